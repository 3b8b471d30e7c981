#include "penstock/models/blocks/experts.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/expert_parallel.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/experts/expert_choice.h"
#include "penstock/torch/experts/expert_rows.h"
#include "penstock/torch/experts/grouped_product.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {

// What the router decided for T tokens.
struct ExpertsImpl::Routing {
  at::Tensor weights;  // [T, top_k], of each choice
  ExpertOrder order;
  at::Tensor balance, router_z;
};

ExpertsImpl::ExpertsImpl(const ExpertOptions& options, std::string layer)
    : options_(options), layer_(std::move(layer)) {
  options_.check();
  reset();
}

void ExpertsImpl::reset() {
  const auto [width, experts, inner] = std::tuple(options_.width, options_.experts, options_.expert_width);
  gate = register_parameter("gate", at::empty({experts, width, inner}));
  up = register_parameter("up", at::empty({experts, width, inner}));
  down = register_parameter("down", at::empty({experts, inner, width}));
  router = register_module("router", torch::nn::Linear(torch::nn::LinearOptions(width, experts).bias(false)));
  if (options_.shared_expert_width > 0)
    shared = register_module("shared", FeedForward(width, options_.shared_expert_width));
  if (options_.router_bias_rate > 0) {
    router_bias = register_buffer("router_bias", at::zeros({experts}));
    router_load = register_buffer("router_load", at::zeros({experts}));
  }
  initialize("experts", {});
}

void ExpertsImpl::initialize(const std::string& name, const BlockInit& init) {
  const auto fill = [&](const at::Tensor& parameter, const char* own, double deviation) {
    fill_normal(parameter, name + own, init.seed, deviation);
  };
  fill(gate, ".gate", init.deviation);
  fill(up, ".up", init.deviation);
  fill(down, ".down", init.residual);
  fill(router->weight, ".router.weight", init.deviation);
  if (!shared.is_empty()) {
    fill(shared->gate->weight, ".shared.gate.weight", init.deviation);
    fill(shared->up->weight, ".shared.up.weight", init.deviation);
    fill(shared->down->weight, ".shared.down.weight", init.residual);
  }
  if (router_bias.defined()) {
    const c10::AutoGradMode no_grad(false);
    router_bias.zero_();
    router_load.zero_();
  }
}

namespace {

// The mean of values [T] or [T, n] over tokens that are not padding. `valid`: undefined, or Bool [T].
at::Tensor mean_of_valid(const at::Tensor& values, const at::Tensor& valid) {
  if (!valid.defined()) return values.mean(0);
  const at::Tensor shares = valid.to(values.scalar_type()) / valid.sum().clamp_min(1);
  return (values * (values.dim() == 2 ? shares.unsqueeze(1) : shares)).sum(0);
}

// How often tokens that are not padding chose each expert: [experts].
at::Tensor counted_choices(const at::Tensor& choices, const at::Tensor& valid, const at::Tensor& all_counts) {
  if (!valid.defined()) return all_counts;
  const at::Tensor ones = valid.unsqueeze(1).expand_as(choices).reshape({-1}).to(all_counts.scalar_type());
  return at::zeros_like(all_counts).index_add(0, choices.reshape({-1}), ones);
}

}  // namespace

ExpertsImpl::Routing ExpertsImpl::route(const at::Tensor& tokens, const at::Tensor& valid) {
  // Rounding logits to 16 bits would change which experts are chosen.
  const NoAutocastScope exact;
  const at::ScalarType dtype = tokens.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor logits = at::linear(tokens.to(dtype), router->weight.to(dtype));  // [T, experts]
  const at::Tensor scores =
      options_.router_scores == RouterScores::Softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  const at::Tensor ranking = router_bias.defined() ? scores.detach() + router_bias.to(dtype) : scores;
  const at::Tensor choices = top_choices(ranking, options_.top_k, layer_);
  at::Tensor weights = scores.gather(1, choices);
  // Sigmoid scores can all be zero.
  if (options_.router_normalize) weights = weights / (weights.sum(-1, true) + 1e-20);

  Routing routing;
  routing.weights = weights;
  routing.order = expert_order(choices, options_.experts, expert_capacity(options_, tokens.size(0)));
  const at::Tensor counts = counted_choices(choices, valid, routing.order.counts);
  const at::Tensor shares = valid.defined() ? counts.to(dtype) / counts.sum().clamp_min(1)
                                            : counts.to(dtype) / static_cast<double>(choices.numel());
  routing.balance = (shares * mean_of_valid(scores, valid)).sum() * static_cast<double>(options_.experts);
  routing.router_z = mean_of_valid(at::logsumexp(logits, {-1}).square(), valid);
  if (router_load.defined() && is_training()) {
    const c10::AutoGradMode no_grad(false);
    router_load.add_(counts);
  }
  return routing;
}

at::Tensor ExpertsImpl::run_experts(const at::Tensor& tokens, const Routing& routing) const {
  const bool parallel = is_dtensor(gate);
  const auto weight = [&](const at::Tensor& parameter) {
    return cast_weight(parallel ? to_local(parameter) : parameter);
  };
  const auto swiglu = [&](const at::Tensor& rows, const at::Tensor& ends) {
    const at::Tensor inner =
        silu_product(grouped_product(rows, weight(gate), ends), grouped_product(rows, weight(up), ends));
    return grouped_product(inner, weight(down), ends);
  };
  const at::Tensor rows = gather_rows(tokens, routing.order);  // [T * top_k, width]
  const at::Tensor results = parallel ? compute_elsewhere(rows, routing.order, mesh_of(gate).group(0), swiglu)
                                      : swiglu(rows, routing.order.ends);
  return combine_rows(results, routing.weights, routing.order);
}

BlockResult ExpertsImpl::forward(const at::Tensor& x, const at::Tensor& valid) {
  if (x.dim() != 3 || x.size(2) != options_.width)
    throw ValueError(describe(fmt::format("{}: hidden states", layer_),
                              fmt::format("{}", fmt::join(x.sizes(), " x ")),
                              fmt::format("batch x length x {}", options_.width)));
  if (valid.defined() && (valid.scalar_type() != at::kBool || valid.sizes() != x.sizes().slice(0, 2)))
    throw ValueError(describe(fmt::format("{}: valid tokens", layer_), shown(valid),
                              fmt::format("Bool [{}, {}]", x.size(0), x.size(1))));
  at::Tensor tokens = x.reshape({x.size(0) * x.size(1), options_.width}),
             counted = valid.defined() ? valid.reshape({-1}) : valid;
  // A limited expert takes the first tokens: padding must come last.
  at::Tensor order;
  if (counted.defined() && options_.capacity_factor > 0) {
    order = std::get<1>(at::sort(counted.logical_not().to(at::kInt), /*stable=*/true, 0, false));
    tokens = tokens.index_select(0, order);
    counted = counted.index_select(0, order);
  }
  const Routing routing = route(tokens, counted);
  at::Tensor hidden = run_experts(cast_once(tokens), routing);
  if (order.defined()) hidden = at::zeros_like(hidden).index_copy(0, order, hidden);
  hidden = hidden.view(x.sizes());
  if (!shared.is_empty()) hidden = hidden + shared->forward(x);
  return {.hidden = hidden, .losses = {{kBalanceLoss, routing.balance}, {kRouterZLoss, routing.router_z}}};
}

void ExpertsImpl::update_router_bias() {
  if (!router_bias.defined()) return;
  const c10::AutoGradMode no_grad(false);
  router_bias.add_(at::sign(router_load.mean() - router_load), options_.router_bias_rate);
  router_load.zero_();
}

}  // namespace penstock::models
