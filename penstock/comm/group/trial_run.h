// Trial runs (StepContext::trial) communicate nothing: only shapes matter in them, and ranks do not agree on when they make one. Replicas of
// a pipeline whose microbatches differ in shape try their stages at different steps.
// Private to this folder.
#pragma once

#include <ATen/ATen.h>

#include "penstock/step_context.h"

namespace penstock::comm {

// Whether this thread makes a trial run. If so, what would have been received is set to zero; a tensor that is sent and received, as in an
// all-reduce, keeps its values.
inline bool skipped_in_trial(at::ArrayRef<at::Tensor> received = {}) {
  if (!StepContext::current()->trial) return false;
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : received) tensor.zero_();
  return true;
}

}  // namespace penstock::comm
