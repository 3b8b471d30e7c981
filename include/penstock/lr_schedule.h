// Learning rate schedules: the rate is a pure function of the step, so there is no state to save or restore.
//
//   optim::LrSchedule cosine{.peak = 3e-4, .floor = 3e-5, .warmup_steps = 100, .total_steps = 2000,
//                            .decay = optim::Decay::Cosine};
//   for (std::int64_t step = 0; step < cosine.total_steps; ++step) {
//     optimizer.set_lr(optim::lr_at(cosine, step));
//     optimizer.step();
//   }
//
// Does not depend on LibTorch. Thread safety: pure functions on values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace penstock::optim {

// How the learning rate decreases after the warm-up.
enum class Decay {
  Constant,  // stays at the peak; `floor` and `total_steps` are ignored
  Cosine,    // half a cosine wave from the peak to the floor
  Linear     // a straight line from the peak to the floor
};

// Returns "constant", "cosine" or "linear".
std::string to_string(Decay decay);
// The inverse of to_string. Throws ValueError for any other text.
Decay parse_decay(std::string_view text);

// A warm-up, followed by a decay.
//
//   lr
//   peak       ____
//            /      \__
//          /           \__
//   floor /               \_________
//        0    warmup     total    step
//
// Step n (from 0) of the warm-up has the rate peak * (n + 1) / (warmup_steps + 1): the first step is not
// without effect, and the first step after the warm-up has the peak. The rate then decreases to the floor,
// which step `total_steps` and all later steps have.
struct LrSchedule {
  double peak = 1e-3;             // highest learning rate, positive
  double floor = 0;               // lowest learning rate after the decay, from 0 to peak
  std::int64_t warmup_steps = 0;  // steps before the peak; 0: the first step has the peak
  std::int64_t total_steps = 0;   // including the warm-up; more than warmup_steps unless Constant
  Decay decay = Decay::Constant;  // how the rate decreases
};

// Throws ValueError that names the field if the schedule is invalid.
void check(const LrSchedule& schedule);

// Returns the learning rate of a step: positive or 0, and at most the peak. The first step is 0. Throws
// ValueError for a negative step, and what check() throws.
double lr_at(const LrSchedule& schedule, std::int64_t step);

}  // namespace penstock::optim
