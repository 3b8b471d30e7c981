#include "penstock/models/blocks/experts.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/comm/group/operators.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/expert_parallel.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/models/blocks/split_rows.h"
#include "penstock/module_scope.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/experts/expert_choice.h"
#include "penstock/torch/experts/expert_feed.h"
#include "penstock/torch/experts/expert_gate.h"
#include "penstock/torch/experts/expert_rows.h"
#include "penstock/torch/experts/grouped_product.h"
#include "penstock/torch/experts/router.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {
namespace {

// From so many rows on, the products of gate and up are one.
constexpr std::int64_t kRowsOfOneProduct = 256;

at::Tensor own_part(const at::Tensor& parameter) {
  return is_dtensor(parameter) ? to_local(parameter) : parameter;
}

}  // namespace

// SwiGLU between the products: of [R, 2 * expert_width], or of the results of gate and up.
struct ExpertsImpl::Gating {
  std::function<at::Tensor(const at::Tensor& joint)> halves;
  std::function<at::Tensor(const at::Tensor& by_gate, const at::Tensor& by_up)> parts;
};

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

// What the losses of a router are made of.
struct RouterMeans {
  at::Tensor mean_scores;  // [experts]
  at::Tensor mean_square;  // of logsumexp(logits)
  at::Tensor counts;       // [experts]: how often each was chosen
};

RouterMeans means_of_all(const Routed& routed, const ExpertOrder& order) {
  return {.mean_scores = routed.mean_scores, .mean_square = routed.mean_square, .counts = order.counts};
}

// The same over tokens that are not padding. `valid`: Bool [T].
RouterMeans means_of_valid(const at::Tensor& logits, const Routed& routed, const at::Tensor& valid,
                           const ExpertOptions& options) {
  const at::Tensor scores =
      options.router_scores == RouterScores::Softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  const at::Tensor weights = valid.to(logits.scalar_type()) / valid.sum().clamp_min(1);
  const at::Tensor ones = valid.unsqueeze(1).expand_as(routed.choices).reshape({-1}).to(at::kInt);
  const at::Tensor counts =
      at::zeros({options.experts}, ones.options()).index_add(0, routed.choices.reshape({-1}), ones);
  return {.mean_scores = (scores * weights.unsqueeze(1)).sum(0),
          .mean_square = (at::logsumexp(logits, {-1}).square() * weights).sum(),
          .counts = counts};
}

}  // namespace

// Where ranks have tokens of their own, they exchange the logits. Every rank then routes all tokens in the
// same way, so that losses are complete on each, and count once.
at::Tensor ExpertsImpl::router_logits_of(const at::Tensor& x) const {
  const NoAutocastScope exact;
  const LocalRegion region(x, router->weight, Rows::BatchAndLength);
  const at::Tensor own = region.enter(x);
  const at::Tensor logits = router_logits(own.reshape({-1, options_.width}), region.weight(router->weight));
  if (!is_dtensor(x)) return logits;
  const at::Tensor by_rows = logits.view({own.size(0), own.size(1), options_.experts});
  return whole_rows(split_rows(by_rows, mesh_of(x))).view({-1, options_.experts});
}

ExpertsImpl::Routing ExpertsImpl::route(const at::Tensor& logits, const at::Tensor& valid) {
  // Logits and scores are float32 although the tokens may not be.
  const NoAutocastScope exact;
  const Routed routed = route_tokens(logits,
                                     {.choices = options_.top_k,
                                      .sigmoid = options_.router_scores == RouterScores::Sigmoid,
                                      .normalize = options_.router_normalize,
                                      .layer = layer_},
                                     router_bias);
  Routing routing;
  routing.weights = routed.weights;
  routing.order = expert_order(routed.choices, options_.experts, expert_capacity(options_, logits.size(0)));
  const RouterMeans means =
      valid.defined() ? means_of_valid(logits, routed, valid, options_) : means_of_all(routed, routing.order);
  const at::Tensor shares =
      shares_of(means.counts, valid.defined() ? 0 : routed.choices.numel(), logits.scalar_type());
  routing.balance = (means.mean_scores * shares).sum() * static_cast<double>(options_.experts);
  routing.router_z = means.mean_square;
  const auto step = StepContext::current();
  if (router_load.defined() && is_training() && !step->recompute && !step->trial) {
    const c10::AutoGradMode no_grad(false);
    router_load.add_(means.counts);
  }
  return routing;
}

// The shares have no gradient, so that the sum of counts is all that ranks exchange: the mean over the ranks
// of (shares of all) * (mean score of each) is the product of the shares and the mean score of all.
at::Tensor ExpertsImpl::shares_of(const at::Tensor& counts, std::int64_t choices,
                                  at::ScalarType dtype) const {
  const bool alone = !balance_ranks_ || balance_ranks_->size() == 1 || !is_training();
  const at::Tensor all = alone ? counts
                               : comm::functional::wait_in_turn(comm::functional::all_reduce(
                                     counts, comm::ReduceOp::Sum, *balance_ranks_));
  if (choices == 0) return all.to(dtype) / all.sum().clamp_min(1);
  return all.to(dtype) / static_cast<double>(choices * (alone ? 1 : balance_ranks_->size()));
}

at::Tensor ExpertsImpl::run_experts(const at::Tensor& tokens, const Routing& routing) const {
  if (!axes_.experts) {
    const at::Tensor by_gate = own_part(gate), by_up = own_part(up), by_down = own_part(down);
    if (can_use_expert_feed(tokens, by_gate, by_up, by_down, routing.weights))
      return expert_feed(tokens, by_gate, by_up, by_down, routing.weights, routing.order);
  }
  const at::Tensor rows = gather_rows(tokens, routing.order);  // [T * top_k, width]
  if (!axes_.experts) {
    const ExpertOrder& order = routing.order;
    return sum_rows(feed(rows, order.ends,
                         {.halves =
                              [&](const at::Tensor& joint) {
                                return weighted_silu_halves(joint, routing.weights, order);
                              },
                          .parts =
                              [&](const at::Tensor& by_gate, const at::Tensor& by_up) {
                                return weighted_silu_product(by_gate, by_up, routing.weights, order);
                              }}),
                    order);
  }
  // The weights stay with the tokens: the ranks of the experts do not know them.
  const auto swiglu = [&](const at::Tensor& arrived, const at::Tensor& ends) {
    return feed(arrived, ends, {.halves = &silu_halves, .parts = &silu_product});
  };
  return combine_rows(compute_elsewhere(rows, routing.order, axes_.experts->group(0), swiglu),
                      routing.weights, routing.order);
}

// On a GPU gate and up are one product, whose weights are joined in the pass that casts them. Elsewhere, and
// for few rows, copying all experts would cost more than it saves.
at::Tensor ExpertsImpl::feed(const at::Tensor& rows, const at::Tensor& ends, const Gating& gating) const {
  const at::ScalarType dtype = rows.scalar_type();
  if (!rows.is_cuda() || rows.size(0) < kRowsOfOneProduct) {
    const auto weight = [&](const at::Tensor& parameter) { return cast_weight(own_part(parameter)); };
    const at::Tensor by_gate = grouped_product(rows, weight(gate), ends),
                     by_up = grouped_product(rows, weight(up), ends);
    return grouped_product(gating.parts(by_gate, by_up), weight(down), ends);
  }
  const at::Tensor inner =
      gating.halves(grouped_product(rows, join_columns(own_part(gate), own_part(up), dtype), ends));
  const at::Tensor last = own_part(down);
  return grouped_product(inner, last.scalar_type() == dtype ? last : join_columns(last, {}, dtype), ends);
}

BlockResult ExpertsImpl::forward(const at::Tensor& x, const at::Tensor& valid) {
  const ModuleScope running(*this);
  if (x.dim() != 3 || x.size(2) != options_.width)
    throw ValueError(describe(fmt::format("{}: hidden states", layer_),
                              fmt::format("{}", fmt::join(x.sizes(), " x ")),
                              fmt::format("batch x length x {}", options_.width)));
  if (valid.defined() && (valid.scalar_type() != at::kBool || valid.sizes() != x.sizes().slice(0, 2)))
    throw ValueError(describe(fmt::format("{}: valid tokens", layer_), shown(valid),
                              fmt::format("Bool [{}, {}]", x.size(0), x.size(1))));
  // The router sees the tokens as the experts do.
  const at::Tensor in = cast_once(x);
  at::Tensor logits = router_logits_of(in), counted = valid.defined() ? valid.reshape({-1}) : valid;
  const LocalRegion region = axes_.columns ? LocalRegion(in, *axes_.columns) : LocalRegion();
  const at::Tensor rows = region.enter(in);
  at::Tensor tokens = rows.reshape({x.size(0) * x.size(1), options_.width});
  // A limited expert takes the first tokens: padding must come last.
  at::Tensor order;
  if (counted.defined() && options_.capacity_factor > 0) {
    order = std::get<1>(at::sort(counted.logical_not().to(at::kInt), /*stable=*/true, 0, false));
    logits = logits.index_select(0, order);
    tokens = tokens.index_select(0, order);
    counted = counted.index_select(0, order);
  }
  Routing routing = route(logits, counted);
  // The router is outside of the region: every rank has all of it, and gradients that are complete.
  if (axes_.columns) routing.weights = LocalRegion(routing.weights, *axes_.columns).enter(routing.weights);
  at::Tensor hidden = run_experts(tokens, routing);
  if (order.defined()) hidden = at::zeros_like(hidden).index_copy(0, order, hidden);
  hidden = hidden.view(x.sizes());
  if (!shared.is_empty()) hidden = hidden + shared->terms(region, rows);
  hidden = region.leave_sum(hidden);
  return {.hidden = hidden, .losses = {{kBalanceLoss, routing.balance}, {kRouterZLoss, routing.router_z}}};
}

void ExpertsImpl::update_router_bias() {
  if (!router_bias.defined()) return;
  const c10::AutoGradMode no_grad(false);
  router_bias.add_(at::sign(router_load.mean() - router_load), options_.router_bias_rate);
  router_load.zero_();
}

}  // namespace penstock::models
