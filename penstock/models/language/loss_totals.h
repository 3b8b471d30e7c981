// Auxiliary losses of training steps, summed by name until somebody asks for them.
//
//   LossTotals totals;                   // of a stage
//   totals.add(losses);                  // in each forward, within the step of a pipeline
//   for (const AuxiliaryLoss& loss : totals.take()) ...
//
// A forward is known by the step and the microbatch of its StepContext, so that one that is repeated counts
// once: in backward, to save memory, or before the step, to learn shapes. The sum does not depend on the
// order of the forwards, which is that of the schedule. Nothing waits for the device, and adding computes
// nothing. Thread safety: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "penstock/trainable_model.h"

namespace penstock::models {

class LossTotals {
 public:
  // Remembers the losses of the current microbatch. Outside of steps, in trial runs and recomputations, and
  // in steps that the device replays without the host, does nothing.
  void add(const std::vector<AuxiliaryLoss>& losses);
  // Returns one sum for each name, in double precision, and starts anew.
  std::vector<AuxiliaryLoss> take();

 private:
  using Forward = std::pair<std::int64_t, std::int64_t>;  // step and microbatch
  void fold();

  std::map<Forward, std::vector<AuxiliaryLoss>> pending_;
  std::vector<AuxiliaryLoss> folded_;
};

}  // namespace penstock::models
