// The router's operators compared with LibTorch's in float64, gradients included.
#include "penstock/torch/experts/router.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/torch/experts/expert_choice.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace router_test {

using test::has_text;
using test::message_of;

struct Case {
  at::Device device;
  at::ScalarType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all{{at::kCPU, at::kDouble}, {at::kCPU, at::kFloat}};
  if (torch::cuda::is_available())
    for (const auto dtype : {at::kDouble, at::kFloat}) all.push_back({at::Device(at::kCUDA, 0), dtype});
  return all;
}

double off(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor wide = actual.to(at::kCPU, at::kDouble), wanted = expected.to(at::kDouble);
  return ((wide - wanted).abs().max() / (wanted.abs().max() + 1e-30)).item<double>();
}

// Everything of a Routed by LibTorch's operators; the choices are given.
Routed plain(const at::Tensor& logits, const RouterRule& rule, const at::Tensor& choices) {
  const at::Tensor scores = rule.sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1);
  at::Tensor weights = scores.gather(1, choices);
  if (rule.normalize) weights = weights / weights.sum(-1, true);
  return {choices, weights, scores.mean(0), at::logsumexp(logits, {-1}).square().mean()};
}

void expect_plain(const Case& each, std::int64_t tokens, std::int64_t experts, const RouterRule& rule,
                  bool biased) {
  SCOPED_TRACE(testing::Message() << each.device << " " << each.dtype << ", " << tokens << " tokens, "
                                  << experts << " experts, " << rule.choices << " choices, sigmoid "
                                  << rule.sigmoid << ", normalize " << rule.normalize << ", biased "
                                  << biased);
  const at::Tensor values = at::randn({tokens, experts}, at::kDouble) * 2;
  const at::Tensor bias =
      biased ? at::randn({experts}, at::kDouble).to(each.device, each.dtype) : at::Tensor();
  const at::Tensor logits = values.to(each.device, each.dtype).set_requires_grad(true);
  const Routed routed = route_tokens(logits, rule, bias);

  const at::Tensor wide = logits.detach().to(at::kCPU, at::kDouble).set_requires_grad(true);
  const at::Tensor scores = (rule.sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1)).detach();
  const at::Tensor ranks = (biased ? scores + bias : scores).to(at::kCPU, at::kDouble);
  const at::Tensor choices = routed.choices.to(at::kCPU);
  // Equal up to rounding of nearly equal ranks: the ranks of the choices are the highest, in their order.
  const auto highest = std::get<0>(ranks.topk(rule.choices, -1));
  EXPECT_LT((ranks.gather(1, choices) - highest).abs().max().item<double>(), 1e-5);

  const Routed expected = plain(wide, rule, choices);
  const double tolerance = each.dtype == at::kDouble ? 1e-12 : 3e-6;
  EXPECT_LT(off(routed.weights, expected.weights), tolerance);
  EXPECT_LT(off(routed.mean_scores, expected.mean_scores), tolerance);
  EXPECT_LT(off(routed.mean_square, expected.mean_square), tolerance);

  const at::Tensor by_weights = at::randn_like(expected.weights),
                   by_means = at::randn({experts}, at::kDouble);
  const auto backward = [&](const Routed& of) {
    const auto like = [&](const at::Tensor& x) {
      return x.to(of.weights.device(), of.weights.scalar_type());
    };
    ((of.weights * like(by_weights)).sum() + (of.mean_scores * like(by_means)).sum() + of.mean_square * 0.3)
        .backward();
  };
  backward(routed);
  backward(expected);
  EXPECT_LT(off(logits.grad(), wide.grad()), 4 * tolerance);
}

TEST(Router, RandomRules) {
  std::mt19937 random(7);
  const auto upto = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  torch::manual_seed(3);
  for (const Case& each : cases())
    for (int round = 0; round < 24; ++round) {
      const int experts = upto(round % 3 == 0 ? 200 : 20);
      expect_plain(
          each, upto(300), experts,
          {.choices = upto(std::min(experts, 6)), .sigmoid = round % 2 == 1, .normalize = round % 4 < 2},
          round % 5 == 0);
    }
}

TEST(Router, OnlyOneResultIsUsed) {
  for (const Case& each : cases()) {
    const at::Tensor logits =
        at::randn({5, 4}, at::kDouble).to(each.device, each.dtype).set_requires_grad(true);
    route_tokens(logits, {.choices = 2}).mean_square.backward();
    const at::Tensor wide = logits.detach().to(at::kCPU, at::kDouble).set_requires_grad(true);
    at::logsumexp(wide, {-1}).square().mean().backward();
    EXPECT_LT(off(logits.grad(), wide.grad()), 1e-5);
  }
}

TEST(Router, NanNamesTheLayerOnTheCpuAndSpreadsOnAGpu) {
  const at::Tensor logits = at::randn({3, 4});
  logits[1].fill_(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { route_tokens(logits, {.choices = 2, .layer = "blocks.1"}); }),
               "blocks.1"));
  if (!torch::cuda::is_available()) return;
  const Routed routed = route_tokens(logits.cuda(), {.choices = 2});
  EXPECT_TRUE(routed.weights[1].isnan().all().item<bool>());
  EXPECT_TRUE(routed.mean_square.isnan().item<bool>());
  EXPECT_TRUE(at::equal(routed.choices[1].cpu(), torch::tensor({0, 1})));
  EXPECT_FALSE(routed.weights[0].isnan().any().item<bool>());
}

TEST(Router, BadLogits) {
  EXPECT_THROW(route_tokens(at::randn({3}), {.choices = 1}), ValueError);
  EXPECT_THROW(route_tokens(at::randn({0, 3}), {.choices = 1}), ValueError);
  EXPECT_THROW(route_tokens(at::randn({2, 3}).to(at::kBFloat16), {.choices = 1}), ValueError);
  EXPECT_THROW(route_tokens(at::randn({2, 3}), {.choices = 4}), ValueError);
}

// Logits of 16-bit tokens are not rounded to 16 bits: 2^-14 of the largest is far below a step of bfloat16.
TEST(Router, LogitsAreWide) {
  std::vector<Case> all = cases();
  for (const at::DeviceType device : {at::kCPU, at::kCUDA})
    if (device == at::kCPU || torch::cuda::is_available())
      all.push_back({at::Device(device, device == at::kCPU ? -1 : 0), at::kBFloat16});
  for (const Case& each : all) {
    SCOPED_TRACE(testing::Message() << each.device << " " << each.dtype);
    torch::manual_seed(5);
    const auto weight_dtype = each.dtype == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor tokens =
        at::randn({70, 48}, at::kDouble).to(each.device, each.dtype).set_requires_grad(true);
    const at::Tensor weight =
        at::randn({24, 48}, at::kDouble).to(each.device, weight_dtype).set_requires_grad(true);
    const at::Tensor logits = router_logits(tokens, weight);
    EXPECT_EQ(logits.scalar_type(), weight_dtype);
    const auto wide = [](const at::Tensor& x) {
      return x.detach().to(at::kCPU, at::kDouble).set_requires_grad(true);
    };
    const at::Tensor exact_tokens = wide(tokens), exact_weight = wide(weight),
                     exact = exact_tokens.mm(exact_weight.t());
    const double tolerance = each.dtype == at::kDouble ? 1e-13 : 1.0 / (1 << 14);
    EXPECT_LT(off(logits, exact), tolerance);
    const at::Tensor by = at::randn_like(exact);
    logits.backward(by.to(each.device, weight_dtype));
    exact.backward(by);
    const double gradients = each.dtype == at::kBFloat16 ? 1.0 / 64 : tolerance;
    EXPECT_EQ(tokens.grad().scalar_type(), each.dtype);
    EXPECT_LT(off(tokens.grad(), exact_tokens.grad()), gradients);
    EXPECT_LT(off(weight.grad(), exact_weight.grad()), gradients);
  }
}

TEST(Router, FakeShapes) {
  FakeMode mode;
  const ModeGuard guard(mode);
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    if (device == at::kCUDA && !torch::cuda::is_available()) continue;  // backward needs its streams
    const at::TensorOptions options = at::TensorOptions(at::Device(device, device == at::kCPU ? -1 : 0));
    const at::Tensor tokens = at::empty({6, 8}, options.dtype(at::kBFloat16)).set_requires_grad(true),
                     weight = at::empty({5, 8}, options).set_requires_grad(true);
    const Routed routed = route_tokens(router_logits(tokens, weight), {.choices = 2});
    EXPECT_EQ(routed.choices.sizes(), at::IntArrayRef({6, 2}));
    EXPECT_EQ(routed.weights.sizes(), at::IntArrayRef({6, 2}));
    (routed.weights.sum() + routed.mean_scores.sum() + routed.mean_square).backward();
    EXPECT_EQ(tokens.grad().sizes(), tokens.sizes());
    EXPECT_EQ(weight.grad().sizes(), weight.sizes());
  }
}

}  // namespace router_test
}  // namespace penstock
