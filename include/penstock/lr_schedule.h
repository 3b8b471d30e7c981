// Learning rates as a pure function of the step: nothing to save, nothing to restore.
//
//   const LrSchedule schedule{.peak = 3e-4, .floor = 3e-5, .warmup_steps = 100, .total_steps = 2000, .decay = Decay::Cosine};
//   check(schedule);                                   // once, when it is read
//   optimizer.set_lr(lr_at(schedule, step));           // before every step; the first step is 0
//
//   lr
//   peak       ____
//            /      \__                 warm-up: the n-th step has peak * n / (warmup_steps + 1), so that no step is without
//          /           \__              effect and the first one after it has the peak
//   floor /               \_________    then down to the floor, which step `total_steps` and all later ones have
//        0    warmup     total    step
//
// Knows nothing of Torch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace penstock::optim {

enum class Decay {
  Constant,  // stays at the peak; `floor` and `total_steps` do not matter
  Cosine,    // half a wave
  Linear
};

// "constant", "cosine", "linear".
std::string to_string(Decay decay);
// Throws ValueError for any other text.
Decay parse_decay(std::string_view text);

struct LrSchedule {
  double peak = 1e-3;              // positive
  double floor = 0;                // 0 .. peak
  std::int64_t warmup_steps = 0;   // 0: the first step has the peak
  std::int64_t total_steps = 0;    // warm-up included; more than warmup_steps, unless Constant
  Decay decay = Decay::Constant;
};

// Throws ValueError that names the field.
void check(const LrSchedule& schedule);

// Between 0 and the peak, for every step from 0. Throws ValueError for a negative step and what check() throws.
double lr_at(const LrSchedule& schedule, std::int64_t step);

}  // namespace penstock::optim
