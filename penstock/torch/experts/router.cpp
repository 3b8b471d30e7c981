#include "penstock/torch/experts/router.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/experts/expert_choice.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = c10::optional<at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

template <class Signature>
auto router_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// ---- logits ----

at::ScalarType logit_dtype(const at::Tensor& tokens) {
  return tokens.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_router(const at::Tensor& tokens, const at::Tensor& weight) {
  if (tokens.dim() != 2 || weight.dim() != 2 || tokens.size(1) != weight.size(1) ||
      !tokens.is_floating_point())
    throw ValueError(describe("router_logits: tokens and weight",
                              fmt::format("{} and {} dims, widths {} and {}", tokens.dim(), weight.dim(),
                                          tokens.size(-1), weight.size(-1)),
                              "[tokens, width] and [experts, width]"));
}

at::Tensor router_logits_meta(const at::Tensor& tokens, const at::Tensor& weight) {
  check_router(tokens, weight);
  return at::empty({tokens.size(0), weight.size(0)}, tokens.options().dtype(logit_dtype(tokens)));
}

at::Tensor router_logits_plain(const at::Tensor& tokens, const at::Tensor& weight) {
  check_router(tokens, weight);
  const at::ScalarType dtype = logit_dtype(tokens);
  return at::mm(tokens.to(dtype), weight.to(dtype).t());
}

#if PENSTOCK_TORCH_AT_LEAST(2, 8)
bool has_wide_product(const at::Tensor& tokens) {
  return (tokens.scalar_type() == at::kBFloat16 || tokens.scalar_type() == at::kHalf) && tokens.numel() > 0;
}
// The product of 16-bit matrices in float32.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b, at::kFloat); }
#else
bool has_wide_product(const at::Tensor&) { return false; }
at::Tensor wide_product(const at::Tensor&, const at::Tensor&) { return {}; }
#endif

at::Tensor router_logits_cuda(const at::Tensor& tokens, const at::Tensor& weight) {
  check_router(tokens, weight);
  if (!has_wide_product(tokens)) return router_logits_plain(tokens, weight);
  const at::Tensor exact = weight.to(at::kFloat), high = exact.to(tokens.scalar_type()),
                   low = (exact - high).to(tokens.scalar_type());
  const at::Tensor both = wide_product(tokens, at::cat({high, low}).t());
  return both.narrow(1, 0, weight.size(0)) + both.narrow(1, weight.size(0), weight.size(0));
}

TwoTensors router_logits_backward_meta(const at::Tensor& gradient, const at::Tensor& tokens,
                                       const at::Tensor& weight) {
  return {at::empty(tokens.sizes(), tokens.options()), at::empty(weight.sizes(), weight.options())};
}

TwoTensors router_logits_backward_plain(const at::Tensor& gradient, const at::Tensor& tokens,
                                        const at::Tensor& weight) {
  const at::ScalarType dtype = gradient.scalar_type();
  return {at::mm(gradient, weight.to(dtype)).to(tokens.scalar_type()),
          at::mm(gradient.t(), tokens.to(dtype)).to(weight.scalar_type())};
}

TwoTensors router_logits_backward_cuda(const at::Tensor& gradient, const at::Tensor& tokens,
                                       const at::Tensor& weight) {
  if (!has_wide_product(tokens)) return router_logits_backward_plain(gradient, tokens, weight);
  const at::Tensor narrow = gradient.to(tokens.scalar_type());
  return {at::mm(narrow, weight.to(tokens.scalar_type())),
          wide_product(narrow.t(), tokens).to(weight.scalar_type())};
}

struct RouterLogits : torch::autograd::Function<RouterLogits> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tokens, const at::Tensor& weight) {
    static const auto op = router_operator<decltype(router_logits_plain)>("penstock::router_logits");
    context->save_for_backward({tokens, weight});
    return op.call(tokens, weight);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        router_operator<decltype(router_logits_backward_plain)>("penstock::router_logits_backward");
    const variable_list saved = context->get_saved_variables();
    // By LibTorch's operators if it is recorded, so that it can be differentiated again.
    const auto [tokens, weight] = c10::GradMode::is_enabled()
                                      ? router_logits_backward_plain(gradients[0], saved[0], saved[1])
                                      : op.call(gradients[0], saved[0], saved[1]);
    return {tokens, weight};
  }
};

// ---- choices and weights: (choices, weights, means), where means [experts + 1] are those of the scores and
// of the squares ----

void check_logits(const at::Tensor& logits) {
  if (logits.dim() != 2 || logits.size(0) == 0 ||
      (logits.scalar_type() != at::kFloat && logits.scalar_type() != at::kDouble))
    throw ValueError(describe("route_tokens: logits",
                              fmt::format("{} dims, {} elements of {}", logits.dim(), logits.numel(),
                                          c10::toString(logits.scalar_type())),
                              "float32 or float64 [tokens, experts], at least one token"));
}

void check_bias(const MaybeTensor& bias, std::int64_t experts) {
  if (bias && bias->defined() && (bias->dim() != 1 || bias->size(0) != experts))
    throw ValueError(describe("route_tokens: bias", fmt::format("{} elements", bias->numel()),
                              fmt::format("one for each of {} experts", experts)));
}

at::Tensor scores_of(const at::Tensor& logits, bool sigmoid) {
  return sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1);
}

// Sigmoid scores can all be zero.
constexpr double kLeastSum = 1e-20;

ThreeTensors route_tokens_meta(const at::Tensor& logits, const MaybeTensor&, std::int64_t count, bool, bool,
                               std::string) {
  check_logits(logits);
  return {at::empty({logits.size(0), count}, logits.options().dtype(at::kLong)),
          at::empty({logits.size(0), count}, logits.options()),
          at::empty({logits.size(1) + 1}, logits.options())};
}

ThreeTensors route_tokens_cpu(const at::Tensor& logits, const MaybeTensor& bias, std::int64_t count,
                              bool sigmoid, bool normalize, std::string layer) {
  check_logits(logits);
  check_bias(bias, logits.size(1));
  const at::Tensor scores = scores_of(logits, sigmoid);
  const bool biased = bias.has_value() && bias->defined();
  const at::Tensor choices =
      top_choices(biased ? scores + bias->to(scores.scalar_type()) : scores, count, layer);
  at::Tensor weights = scores.gather(1, choices);
  if (normalize) weights = weights / (weights.sum(-1, true) + kLeastSum);
  const at::Tensor square = at::logsumexp(logits, {-1}).square().mean();
  return {choices, weights, at::cat({scores.mean(0), square.view({1})})};
}

ThreeTensors route_tokens_cuda(const at::Tensor& given, const MaybeTensor& bias, std::int64_t count,
                               bool sigmoid, bool normalize, std::string layer) {
  check_logits(given);
  check_bias(bias, given.size(1));
  if (count < 1 || count > given.size(1))
    throw ValueError(describe("route_tokens: choices", fmt::format("{}", count),
                              fmt::format("from 1 to the number of experts, {}", given.size(1))));
  if (!detail::routes_on_device(given.size(1)))
    return route_tokens_cpu(given, bias, count, sigmoid, normalize, layer);
  const at::Tensor logits = given.contiguous();
  auto [choices, weights, unused] = route_tokens_meta(logits, bias, count, sigmoid, normalize, layer);
  const at::Tensor offsets =
      bias.has_value() && bias->defined() ? bias->to(logits.scalar_type()).contiguous() : at::Tensor();
  const at::Tensor sums = detail::launch_route_tokens(logits, offsets, sigmoid, normalize, choices, weights);
  return {choices, weights, sums / static_cast<double>(logits.size(0))};
}

at::Tensor route_tokens_backward_meta(const at::Tensor& logits, const at::Tensor&, const at::Tensor&,
                                      const at::Tensor&, bool, bool) {
  return at::empty(logits.sizes(), logits.options());
}

at::Tensor route_tokens_backward_plain(const at::Tensor& logits, const at::Tensor& choices,
                                       const at::Tensor& by_weights, const at::Tensor& by_means, bool sigmoid,
                                       bool normalize) {
  const std::int64_t tokens = logits.size(0), experts = logits.size(1);
  const at::Tensor scores = scores_of(logits, sigmoid);
  at::Tensor by_chosen = by_weights;
  if (normalize) {
    const at::Tensor chosen = scores.gather(1, choices), sum = chosen.sum(-1, true) + kLeastSum;
    by_chosen = (by_weights - (by_weights * chosen).sum(-1, true) / sum) / sum;
  }
  const at::Tensor by_scores = by_means.narrow(0, 0, experts)
                                   .div(static_cast<double>(tokens))
                                   .expand_as(scores)
                                   .scatter_add(1, choices, by_chosen);
  const at::Tensor shares = sigmoid ? at::softmax(logits, -1) : scores;
  const at::Tensor by_logits =
      sigmoid ? by_scores * scores * (1 - scores) : scores * (by_scores - (by_scores * scores).sum(-1, true));
  const at::Tensor by_square = by_means.narrow(0, experts, 1) * (2.0 / static_cast<double>(tokens));
  return by_logits + at::logsumexp(logits, {-1}, true) * by_square * shares;
}

at::Tensor route_tokens_backward_cuda(const at::Tensor& logits, const at::Tensor& choices,
                                      const at::Tensor& by_weights, const at::Tensor& by_means, bool sigmoid,
                                      bool normalize) {
  if (!detail::routes_on_device(logits.size(1)))
    return route_tokens_backward_plain(logits, choices, by_weights, by_means, sigmoid, normalize);
  const at::Tensor result = at::empty(logits.sizes(), logits.options());
  detail::launch_route_tokens_backward(logits, choices, by_weights.contiguous(), by_means.contiguous(),
                                       sigmoid, normalize, result);
  return result;
}

struct RouteTokens : torch::autograd::Function<RouteTokens> {
  static variable_list forward(AutogradContext* context, const at::Tensor& given, const MaybeTensor& bias,
                               std::int64_t count, bool sigmoid, bool normalize, const std::string& layer) {
    static const auto op = router_operator<decltype(route_tokens_cpu)>("penstock::route_tokens");
    auto [choices, weights, means] = op.call(given.contiguous(), bias, count, sigmoid, normalize, layer);
    // As given: a copy has no history that a second derivative could follow.
    context->save_for_backward({given, choices});
    context->mark_non_differentiable({choices});
    context->saved_data["sigmoid"] = sigmoid;
    context->saved_data["normalize"] = normalize;
    return {choices, weights, means};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        router_operator<decltype(route_tokens_backward_plain)>("penstock::route_tokens_backward");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &choices = saved[1];
    const auto given_or_zeros = [&](const at::Tensor& gradient, at::IntArrayRef sizes) {
      return gradient.defined() ? gradient : at::zeros(sizes, logits.options());
    };
    const at::Tensor by_weights = given_or_zeros(gradients[1], choices.sizes()),
                     by_means = given_or_zeros(gradients[2], {logits.size(1) + 1});
    const bool sigmoid = context->saved_data["sigmoid"].toBool(),
               normalize = context->saved_data["normalize"].toBool();
    return {c10::GradMode::is_enabled()
                ? route_tokens_backward_plain(logits, choices, by_weights, by_means, sigmoid, normalize)
                : op.call(logits.contiguous(), choices, by_weights, by_means, sigmoid, normalize),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor router_logits(const at::Tensor& tokens, const at::Tensor& weight) {
  return RouterLogits::apply(tokens, weight);
}

Routed route_tokens(const at::Tensor& logits, const RouterRule& rule, const at::Tensor& bias) {
  const variable_list routed = RouteTokens::apply(logits, bias.defined() ? MaybeTensor(bias) : MaybeTensor(),
                                                  rule.choices, rule.sigmoid, rule.normalize, rule.layer);
  const std::int64_t experts = logits.size(1);
  return {.choices = routed[0],
          .weights = routed[1],
          .mean_scores = routed[2].narrow(0, 0, experts),
          .mean_square = routed[2].select(0, experts)};
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("router_logits(Tensor tokens, Tensor weight) -> Tensor");
  library.def("router_logits_backward(Tensor gradient, Tensor tokens, Tensor weight) -> (Tensor, Tensor)");
  library.def(
      "route_tokens(Tensor logits, Tensor? bias, int count, bool sigmoid, bool normalize, str layer) -> "
      "(Tensor choices, Tensor weights, Tensor means)");
  library.def(
      "route_tokens_backward(Tensor logits, Tensor choices, Tensor by_weights, Tensor by_means, bool "
      "sigmoid, "
      "bool normalize) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) {
  library.impl("router_logits", &router_logits_plain);
  library.impl("router_logits_backward", &router_logits_backward_plain);
  library.impl("route_tokens", &route_tokens_cpu);
  library.impl("route_tokens_backward", &route_tokens_backward_plain);
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("router_logits", &router_logits_cuda);
  library.impl("router_logits_backward", &router_logits_backward_cuda);
  library.impl("route_tokens", &route_tokens_cuda);
  library.impl("route_tokens_backward", &route_tokens_backward_cuda);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("router_logits", &router_logits_meta);
  library.impl("router_logits_backward", &router_logits_backward_meta);
  library.impl("route_tokens", &route_tokens_meta);
  library.impl("route_tokens_backward", &route_tokens_backward_meta);
}

}  // namespace penstock
