#include "penstock/models/blocks/mixture_of_depths.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <limits>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"

namespace penstock::models {
namespace {

// The mean over the tokens of -log p(chosen or not), where p(chosen) = sigmoid(logit). `valid`: undefined, or
// Bool like the logits; others do not count.
at::Tensor choice_loss(const at::Tensor& logits, const ChosenTokens& chosen, const at::Tensor& valid) {
  const at::Tensor target = at::zeros_like(logits).scatter(1, chosen.positions(), 1);
  const at::Tensor each = at::softplus(logits).sub(logits.mul(target));
  if (!valid.defined()) return each.mean();
  return each.masked_fill(valid.logical_not(), 0).sum() / valid.sum().clamp_min(1);
}

// Padding is chosen last.
at::Tensor ranks(const at::Tensor& logits, const at::Tensor& valid) {
  return valid.defined() ? logits.masked_fill(valid.logical_not(), -std::numeric_limits<double>::infinity())
                         : logits;
}

}  // namespace

MixtureOfDepthsImpl::MixtureOfDepthsImpl(const DepthOptions& options) : options_(options) {
  options_.check();
  reset();
}

void MixtureOfDepthsImpl::reset() {
  router = register_module("router", torch::nn::Linear(torch::nn::LinearOptions(options_.width, 1)));
  if (options_.kind == DepthKind::Gamma)
    gamma = register_parameter("gamma", at::full({options_.width}, options_.gamma));
}

void MixtureOfDepthsImpl::initialize(const std::string& name, const BlockInit& init) {
  const c10::AutoGradMode no_grad(false);
  fill_normal(router->weight, name + ".router.weight", init.seed, init.deviation);
  router->bias.fill_(0);
  if (gamma.defined()) gamma.fill_(options_.gamma);
}

at::Tensor MixtureOfDepthsImpl::logits_of(const at::Tensor& x) {
  // Autocast would round the products to 16 bits, and equal logits would be chosen arbitrarily.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const LocalRegion region(x, router->weight, Rows::BatchAndLength);
  const at::ScalarType dtype = wide_dtype(x.scalar_type());
  return at::linear(region.enter(x).to(dtype), region.weight(router->weight).to(dtype),
                    region.weight(router->bias).to(dtype))
      .squeeze(-1);
}

BlockResult MixtureOfDepthsImpl::forward(const at::Tensor& x, const RoutedBlock& block, DepthChoice choice,
                                         const at::Tensor& valid) {
  check_hidden("MixtureOfDepths: input", x, options_.width);
  if (valid.defined() && (valid.scalar_type() != at::kBool || valid.sizes() != x.sizes().slice(0, 2)))
    throw ValueError(describe("MixtureOfDepths: valid tokens", shown(valid),
                              fmt::format("Bool [{}, {}]", x.size(0), x.size(1))));
  if (is_dtensor(x))
    throw NotImplemented(
        "mixture of depths of distributed activations; pass plain ones to the model (the rows of this rank)");
  const at::Tensor logits = logits_of(x);
  const ChosenTokens chosen = choice == DepthChoice::Capacity
                                  ? ChosenTokens::highest(ranks(logits, valid), options_.chosen(x.size(1)))
                                  : ChosenTokens::positive(logits);
  const at::Tensor rows = chosen.of_tokens(x);
  BlockResult inner = block(rows, chosen);
  if (!inner.hidden.defined() || inner.hidden.sizes() != rows.sizes())
    throw ValueError(describe("MixtureOfDepths: what the block adds", shown(inner.hidden),
                              fmt::format("a tensor like the chosen rows, {}", shown(rows))));
  at::Tensor added = inner.hidden.mul(at::sigmoid(chosen.of_tokens(logits)).unsqueeze(-1));
  if (gamma.defined()) added = added.mul(LocalRegion(x, router->weight, Rows::BatchAndLength).weight(gamma));
  // Not a product with 0: what the block computed for a token that is not active may be anything.
  if (chosen.active().defined()) added = added.masked_fill(chosen.active().logical_not().unsqueeze(-1), 0);
  BlockResult result{chosen.add_to(x, added.to(x.scalar_type()))};
  if (choice == DepthChoice::Threshold) return result;
  result.losses = std::move(inner.losses);
  result.losses.push_back({kDepthRouterLoss, choice_loss(logits, chosen, valid)});
  return result;
}

BlockResult without_residual(BlockResult result, const at::Tensor& rows) {
  result.hidden = result.hidden.sub(rows);
  return result;
}

at::Tensor kept_state(const at::Tensor& before, const at::Tensor& after, const ChosenTokens& chosen) {
  if (!chosen.active().defined()) return after;
  if (chosen.length() != 1)
    throw ValueError(describe("kept_state: tokens", fmt::format("{}", chosen.length()), "1"));
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(after.dim()), 1);
  sizes[0] = after.size(0);
  return at::where(chosen.active().view(sizes), after, before);
}

}  // namespace penstock::models
