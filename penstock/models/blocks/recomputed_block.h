// Blocks of a stage whose activations are recomputed in the backward.
//
//   if (!recomputes_now(plan, {.number = 3, .letter = 'E'}, part.index)) return block->forward(x, context);
//   return recomputed_block(x, [block, context](const at::Tensor& in) { return block->forward(in, context);
//   });
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "penstock/recompute.h"
#include "penstock/recompute_plan.h"
#include "penstock/step_context.h"

namespace penstock::models {

// Whether the plan chooses the block for the running microbatch. Outside of any step a plan for chosen
// microbatches applies to all.
inline bool recomputes_now(const RecomputePlan& plan, const BlockId& block, int stage) {
  return plan.any() && plan.recomputes(block, stage, StepContext::current()->microbatch);
}

// Returns forward(x). `forward` must own what it uses: it runs again in the backward, up to the last tensor
// that is needed. Random numbers of blocks have keys, so that no generator is involved.
template <class Forward>
auto recomputed_block(const at::Tensor& x, Forward forward) {
  return recompute(
      [forward = std::move(forward)](const std::vector<at::Tensor>& in) mutable { return forward(in[0]); },
      {x}, {.early_stop = true, .preserve_generators = false});
}

}  // namespace penstock::models
