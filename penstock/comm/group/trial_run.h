// Trial runs (StepContext::trial) do not communicate. Only shapes matter in them, and ranks run them at
// different times: replicas of a pipeline whose microbatches differ in shape try their stages at different
// steps. Private to this folder.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "penstock/step_context.h"

namespace penstock::comm {

// Returns whether this thread is in a trial run. If so, sets the tensors that would have been received to
// zero; a tensor that is both sent and received, as in an all-reduce, keeps its values.
inline bool skipped_in_trial(at::ArrayRef<at::Tensor> received = {}) {
  if (!StepContext::current()->trial) return false;
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& tensor : received) tensor.zero_();
  return true;
}

}  // namespace penstock::comm
