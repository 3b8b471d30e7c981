// Moves the rows of tokens to the slots of their experts and back.
//
//   ExpertOrder order = expert_order(choices, experts);         // expert_choice.h
//   at::Tensor rows = gather_rows(tokens, order);               // [T, D] -> [T * k, D], sorted by expert
//   at::Tensor y = combine_rows(rows, weights, order);          // [T * k, D], weights [T, k] -> [T, D]
//   at::Tensor z = sum_rows(rows, order);                       // the same with weights of 1
//
// Each direction is one pass over memory, a registered operator with its own derivative, and deterministic:
// sums over the choices of a token are computed in the order of the choices, in float32 (float64 for
// float64), and rounded once. The derivative of one operator is a pass of the other. gather_rows() and
// sum_rows() are linear and can be differentiated any number of times; a second derivative of combine_rows()
// is an error (once_differentiable.h). Nothing waits for the device. Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/torch/experts/expert_choice.h"

namespace penstock {

// Copies the row of each choice's token to the choice's slot. Slots without a choice are zero. `order` must
// be made from choices [T, k].
at::Tensor gather_rows(const at::Tensor& tokens, const ExpertOrder& order);

// Returns for each token the sum over its choices of weight times row, in the dtype of the rows. Dropped
// choices contribute nothing, and their weights have no gradient. `weights` is float32, or float64 for rows
// in float64.
at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const ExpertOrder& order);

// Returns for each token the sum of the rows of its choices. Its derivative needs no rows, and nothing is
// saved for it but the order, which the node holds itself: a recomputed part (recompute.h) can end before.
at::Tensor sum_rows(const at::Tensor& rows, const ExpertOrder& order);

}  // namespace penstock
