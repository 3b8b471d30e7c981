// Auxiliary losses (block_result.h) on their way into backward.
//
//   // where the loss of the model is computed
//   loss = loss + weighted_sum(result.losses, weights);
//   // in a stage of a pipeline that is not the last: its losses enter backward through its output
//   return inject_losses(x, result.losses, weights, scale);
//
// Several losses of one name (from several blocks) count as their mean. There is no state besides the
// autograd graph: the scale is an argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/models/blocks/block_result.h"
#include "penstock/models/plan/loss_weights.h"

namespace penstock::models {

// Returns `hidden` unchanged, as a view; its backward passes the gradient on and in addition starts the
// backward of `loss`, a scalar, with the gradient `scale`. That happens when a gradient arrives at the
// result, so the result must be used. `scale` must match the factor by which the loss of the model is
// multiplied: for example 1 / (accumulation steps * microbatches). Can be captured, and runs in both kinds of
// split backward. Throws ValueError for a loss that is not a floating-point scalar. A loss without a gradient
// has no effect.
at::Tensor inject_loss(const at::Tensor& hidden, const at::Tensor& loss, double scale);
// The same with a scale that is a scalar tensor, so that it may change from one replay of a captured graph to
// the next. No gradient flows to it. Throws ValueError also if it is on a device other than that of the loss.
at::Tensor inject_loss(const at::Tensor& hidden, const at::Tensor& loss, const at::Tensor& scale);

// One loss for each name, in the order in which names first occur: the mean of the losses of that name.
std::vector<NamedLoss> mean_by_name(const std::vector<NamedLoss>& losses);
// The sum of weight * mean over the names. Undefined if there are no losses. Throws ValueError for a loss
// without a weight.
at::Tensor weighted_sum(const std::vector<NamedLoss>& losses, const LossWeights& weights);
// Injects weighted_sum(), or returns `hidden` if there are no losses.
at::Tensor inject_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses,
                         const LossWeights& weights, double scale);
at::Tensor inject_losses(const at::Tensor& hidden, const std::vector<NamedLoss>& losses,
                         const LossWeights& weights, const at::Tensor& scale);

}  // namespace penstock::models
