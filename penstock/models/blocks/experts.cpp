#include "penstock/models/blocks/experts.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/comm/group/operators.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/expert_parallel.h"
#include "penstock/models/blocks/local_region.h"
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

ExpertsImpl::Routing ExpertsImpl::route(const at::Tensor& tokens) {
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
  const at::Tensor shares = shares_of(routing.order.counts, choices.numel(), dtype);
  routing.balance = (shares * scores.mean(0)).sum() * static_cast<double>(options_.experts);
  routing.router_z = at::logsumexp(logits, {-1}).square().mean();
  if (router_load.defined() && is_training()) {
    const c10::AutoGradMode no_grad(false);
    router_load.add_(routing.order.counts);
  }
  return routing;
}

// The shares have no gradient, so that the sum of counts is all that ranks exchange: the mean over the ranks
// of (shares of all) * (mean score of each) is the product of the shares and the mean score of all.
at::Tensor ExpertsImpl::shares_of(const at::Tensor& counts, std::int64_t choices,
                                  at::ScalarType dtype) const {
  const bool alone = !balance_ranks_ || balance_ranks_->size() == 1 || !is_training();
  const at::Tensor all = alone ? counts
                               : comm::functional::wait_tensor(comm::functional::all_reduce(
                                     counts, comm::ReduceOp::Sum, *balance_ranks_));
  return all.to(dtype) / static_cast<double>(choices * (alone ? 1 : balance_ranks_->size()));
}

at::Tensor ExpertsImpl::run_experts(const at::Tensor& tokens, const Routing& routing) const {
  const auto weight = [](const at::Tensor& parameter) {
    return cast_weight(is_dtensor(parameter) ? to_local(parameter) : parameter);
  };
  const auto swiglu = [&](const at::Tensor& rows, const at::Tensor& ends) {
    const at::Tensor inner =
        silu_product(grouped_product(rows, weight(gate), ends), grouped_product(rows, weight(up), ends));
    return grouped_product(inner, weight(down), ends);
  };
  const at::Tensor rows = gather_rows(tokens, routing.order);  // [T * top_k, width]
  const at::Tensor results = axes_.experts
                                 ? compute_elsewhere(rows, routing.order, axes_.experts->group(0), swiglu)
                                 : swiglu(rows, routing.order.ends);
  return combine_rows(results, routing.weights, routing.order);
}

BlockResult ExpertsImpl::forward(const at::Tensor& x) {
  if (x.dim() != 3 || x.size(2) != options_.width)
    throw ValueError(describe(fmt::format("{}: hidden states", layer_),
                              fmt::format("{}", fmt::join(x.sizes(), " x ")),
                              fmt::format("batch x length x {}", options_.width)));
  const at::Tensor tokens = x.reshape({x.size(0) * x.size(1), options_.width});
  Routing routing = route(tokens);
  at::Tensor hidden;
  if (axes_.columns) {
    // The router is outside: every rank has all of it, and gradients that are complete.
    const LocalRegion region(*axes_.columns);
    routing.weights = region.enter(routing.weights);
    hidden = region.leave_sum(run_experts(cast_once(region.enter(tokens)), routing));
  } else {
    hidden = run_experts(cast_once(tokens), routing);
  }
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
