// The expert block compared with a loop over tokens in double precision, and its options.
#include "penstock/models/blocks/experts.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/models/blocks/recomputed_block.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::models {
namespace experts_test {

using penstock::test::has_text;
using penstock::test::message_of;

at::Tensor random_numbers(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble)).to(dtype);
}

// Larger deviations than in training, so that every part has an effect.
Experts made(const ExpertOptions& options, at::ScalarType dtype = at::kDouble) {
  Experts experts(options, "blocks.2.experts");
  experts->to(dtype);
  experts->initialize("blocks.2.experts", {.seed = 3, .deviation = 0.4, .residual = 0.3});
  return experts;
}

// ------------------------------------------------------------------------------------------- the reference

// Parameters in double, as leaves.
using Values = std::map<std::string, at::Tensor>;
Values values_of(const Experts& experts) {
  Values values;
  for (const auto& item : experts->named_parameters())
    values[item.key()] = item.value().detach().to(at::kDouble).clone().set_requires_grad(true);
  for (const auto& item : experts->named_buffers())
    values[item.key()] = item.value().detach().to(at::kDouble).clone();
  return values;
}

struct Reference {
  at::Tensor hidden, balance, router_z;
  std::vector<std::int64_t> load;  // choices of each expert
  std::int64_t dropped = 0;
};

at::Tensor swiglu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down) {
  return (at::silu(x.matmul(gate)) * x.matmul(up)).matmul(down);
}

// One token after another, as the header describes it.
Reference reference(const ExpertOptions& options, const Values& values, const at::Tensor& x) {
  const at::Tensor tokens = x.reshape({-1, options.width});
  const std::int64_t count = tokens.size(0);
  const auto experts = static_cast<std::size_t>(options.experts);
  std::vector<std::int64_t> taken(experts, 0);
  std::int64_t capacity = std::numeric_limits<std::int64_t>::max();
  if (options.capacity_factor > 0) capacity = expert_capacity(options, count);
  Reference result;
  result.load.assign(experts, 0);
  at::Tensor score_sum = at::zeros({options.experts}, at::kDouble), z_sum = at::zeros({}, at::kDouble);
  std::vector<at::Tensor> rows;
  for (std::int64_t t = 0; t < count; ++t) {
    const at::Tensor logits = values.at("router.weight").matmul(tokens[t]);
    const at::Tensor scores =
        options.router_scores == RouterScores::Softmax ? logits.softmax(0) : logits.sigmoid();
    score_sum = score_sum + scores;
    z_sum = z_sum + logits.logsumexp(0).square();
    at::Tensor ranking = scores.detach();
    if (values.contains("router_bias")) ranking = ranking + values.at("router_bias");
    std::vector<std::int64_t> ranked(experts);
    std::iota(ranked.begin(), ranked.end(), 0);
    std::stable_sort(ranked.begin(), ranked.end(), [&](std::int64_t a, std::int64_t b) {
      return ranking[a].item<double>() > ranking[b].item<double>();
    });
    ranked.resize(static_cast<std::size_t>(options.top_k));
    at::Tensor total = at::zeros({}, at::kDouble), row = at::zeros({options.width}, at::kDouble);
    for (const std::int64_t expert : ranked) total = total + scores[expert];
    for (const std::int64_t expert : ranked) {
      ++result.load[static_cast<std::size_t>(expert)];
      if (taken[static_cast<std::size_t>(expert)]++ >= capacity) {
        ++result.dropped;
        continue;
      }
      const at::Tensor weight = options.router_normalize ? scores[expert] / total : scores[expert];
      row = row + weight * swiglu(tokens[t], values.at("gate")[expert], values.at("up")[expert],
                                  values.at("down")[expert]);
    }
    if (options.shared_expert_width > 0)
      row = row + swiglu(tokens[t], values.at("shared.gate.weight").t(), values.at("shared.up.weight").t(),
                         values.at("shared.down.weight").t());
    rows.push_back(row);
  }
  result.hidden = at::stack(rows).view(x.sizes());
  result.balance = at::zeros({}, at::kDouble);
  for (std::int64_t expert = 0; expert < options.experts; ++expert)
    result.balance = result.balance + static_cast<double>(options.experts) *
                                          static_cast<double>(result.load[static_cast<std::size_t>(expert)]) /
                                          static_cast<double>(count * options.top_k) * score_sum[expert] /
                                          static_cast<double>(count);
  result.router_z = z_sum / static_cast<double>(count);
  return result;
}

at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& balance, const at::Tensor& router_z) {
  const at::Tensor factors = at::linspace(-1, 1.5, hidden.numel(), at::kDouble).view(hidden.sizes());
  return (hidden.to(at::kDouble) * factors).sum() + 0.7 * balance + 0.3 * router_z;
}

void expect_near(const at::Tensor& value, const at::Tensor& wanted, double near, const std::string& what) {
  ASSERT_TRUE(value.defined()) << what;
  ASSERT_EQ(value.sizes(), wanted.sizes()) << what;
  const double scale = std::max(1.0, wanted.abs().max().item<double>());
  EXPECT_LE((value.to(at::kDouble) - wanted).abs().max().item<double>(), near * scale) << what;
}

at::Tensor loss_named(const BlockResult& result, const std::string& name) {
  for (const NamedLoss& loss : result.losses)
    if (loss.name == name) return loss.value;
  ADD_FAILURE() << "no loss " << name;
  return {};
}

// Hidden states, losses and all gradients; returns the reference.
Reference expect_reference(const ExpertOptions& options, at::Tensor x, const std::string& what,
                           double near = 1e-12, const at::Tensor& router_bias = {}) {
  Experts experts = made(options, x.scalar_type());
  if (router_bias.defined()) experts->router_bias.copy_(router_bias);
  Values values = values_of(experts);
  x = x.detach().set_requires_grad(true);
  const at::Tensor exact_x = x.detach().to(at::kDouble).clone().set_requires_grad(true);
  const BlockResult result = experts->forward(x);
  Reference wanted = reference(options, values, exact_x);
  expect_near(result.hidden, wanted.hidden, near, what);
  EXPECT_EQ(result.losses.size(), 2u) << what;
  expect_near(loss_named(result, kBalanceLoss), wanted.balance, near, what + ", balance");
  expect_near(loss_named(result, kRouterZLoss), wanted.router_z, near, what + ", router_z");
  loss_of(result.hidden, loss_named(result, kBalanceLoss), loss_named(result, kRouterZLoss)).backward();
  loss_of(wanted.hidden, wanted.balance, wanted.router_z).backward();
  expect_near(x.grad(), exact_x.grad(), near, what + ", gradient of x");
  for (const auto& item : experts->named_parameters()) {
    at::Tensor& exact = values.at(item.key());
    const at::Tensor gradient = exact.grad().defined() ? exact.grad() : at::zeros_like(exact);
    expect_near(item.value().grad(), gradient, near, what + ", gradient of " + item.key());
  }
  return wanted;
}

constexpr ExpertOptions kSmall{.width = 6, .experts = 5, .top_k = 2, .expert_width = 7};

// ------------------------------------------------------------------------------------------------- numbers

TEST(Experts, EveryKindOfRouter) {
  for (const RouterScores scores : {RouterScores::Softmax, RouterScores::Sigmoid})
    for (const bool normalize : {true, false})
      for (const std::int64_t shared : {0, 9}) {
        ExpertOptions options = kSmall;
        options.router_scores = scores;
        options.router_normalize = normalize;
        options.shared_expert_width = shared;
        expect_reference(
            options, random_numbers({2, 9, 6}, 1),
            to_string(scores) + (normalize ? " normalized" : "") + (shared > 0 ? " shared" : ""));
      }
}

TEST(Experts, RandomSizes) {
  std::mt19937 random(7);
  for (int round = 0; round < 12; ++round) {
    ExpertOptions options{.width = 1 + static_cast<std::int64_t>(random() % 9),
                          .experts = 1 + static_cast<std::int64_t>(random() % 12),
                          .expert_width = 1 + static_cast<std::int64_t>(random() % 9)};
    options.top_k = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(options.experts));
    if (round % 3 == 1) options.capacity_factor = 0.2 + static_cast<double>(random() % 10) / 8;
    expect_reference(options,
                     random_numbers({1 + static_cast<std::int64_t>(random() % 3),
                                     1 + static_cast<std::int64_t>(random() % 12), options.width},
                                    random()),
                     "round " + std::to_string(round));
  }
}

TEST(Experts, OneToken) { expect_reference(kSmall, random_numbers({1, 1, 6}, 2), "one token"); }

TEST(Experts, EveryTokenUsesEveryExpert) {
  ExpertOptions options = kSmall;
  options.top_k = options.experts;
  const Reference wanted = expect_reference(options, random_numbers({3, 4, 6}, 3), "all experts");
  EXPECT_NEAR(wanted.balance.item<double>(), 1, 1e-12);
}

// A bias far above all scores sends every token to the same experts.
TEST(Experts, OneExpertGetsAllAndTheOthersNone) {
  ExpertOptions options = kSmall;
  options.top_k = 1;
  options.router_bias_rate = 0.001;
  const Reference wanted = expect_reference(options, random_numbers({2, 8, 6}, 4), "one expert", 1e-12,
                                            torch::tensor({0.0, 0.0, 0.0, 10.0, 0.0}, at::kDouble));
  EXPECT_EQ(wanted.load, (std::vector<std::int64_t>{0, 0, 0, 16, 0}));
}

TEST(Experts, CapacityDropsTheLastTokens) {
  ExpertOptions options = kSmall;
  for (const double factor : {0.1, 0.5, 1.0}) {
    options.capacity_factor = factor;
    const Reference wanted = expect_reference(options, random_numbers({2, 11, 6}, 5), std::to_string(factor));
    EXPECT_GT(wanted.dropped, 0) << factor;
  }
  options.capacity_factor = 5;
  EXPECT_EQ(expect_reference(options, random_numbers({2, 11, 6}, 5), "5").dropped, 0);
}

TEST(Experts, StridedHiddenStatesAndFloat32) {
  expect_reference(kSmall, random_numbers({9, 2, 6}, 6).transpose(0, 1), "strided");
  // Sums of few terms in float32, in another order than in the reference.
  expect_reference(kSmall, random_numbers({2, 9, 6}, 6, at::kFloat), "float32", 2e-6);
}

// Under autocast the router computes in float32: the same experts are chosen as without.
TEST(Experts, AutocastComputesExpertsIn16BitsAndRoutesInFloat32) {
  ExpertOptions options{.width = 16, .experts = 8, .top_k = 2, .expert_width = 24, .shared_expert_width = 8};
  Experts experts = made(options, at::kFloat);
  const at::Tensor x = random_numbers({2, 64, 16}, 8, at::kFloat).set_requires_grad(true);
  const Values values = values_of(experts);
  BlockResult result;
  {
    const AutocastScope casts(at::kCPU, at::kBFloat16);
    result = experts->forward(x);
  }
  EXPECT_EQ(result.hidden.scalar_type(), at::kBFloat16);
  // The router sees the tokens rounded as the experts do.
  const Reference wanted = reference(options, values, x.detach().to(at::kBFloat16).to(at::kDouble));
  for (const char* name : {kBalanceLoss, kRouterZLoss})
    EXPECT_EQ(loss_named(result, name).scalar_type(), at::kFloat);
  // The share of each expert is exact only if no choice differs.
  expect_near(loss_named(result, kBalanceLoss), wanted.balance, 1e-6, "balance");
  expect_near(loss_named(result, kRouterZLoss), wanted.router_z, 1e-6, "router_z");
  // Five roundings to 8 bits, relative to the largest hidden state.
  expect_near(result.hidden, wanted.hidden, 5.0 / 256, "hidden");
  loss_of(result.hidden, loss_named(result, kBalanceLoss), loss_named(result, kRouterZLoss)).backward();
  for (const at::Tensor& parameter : experts->parameters()) {
    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    EXPECT_GT(parameter.grad().abs().sum().item<float>(), 0);
  }
}

// ---------------------------------------------------------------------------------------------- balancing

TEST(Experts, BiasChangesTheChoiceOnly) {
  ExpertOptions options = kSmall;
  options.router_bias_rate = 0.01;
  const at::Tensor x = random_numbers({2, 9, 6}, 9);
  const Reference biased =
      expect_reference(options, x, "biased", 1e-12, torch::tensor({0.0, 0.3, -0.2, 0.1, 0.0}, at::kDouble));
  const Reference plain = expect_reference(options, x, "plain");
  EXPECT_NE(biased.load, plain.load);
}

TEST(Experts, BiasMovesTowardsEqualLoad) {
  ExpertOptions options = kSmall;
  options.router_bias_rate = 0.01;
  Experts experts = made(options);
  experts->router_bias[0].fill_(0.4);  // expert 0 gets nearly all tokens
  const at::Tensor x = random_numbers({2, 32, 6}, 10);
  experts->forward(x);
  const Reference wanted = reference(options, values_of(experts), x);
  // The load counts tokens until the update, over several forwards.
  experts->forward(x);
  const at::Tensor load = torch::tensor(wanted.load, at::kLong).to(at::kDouble) * 2;
  EXPECT_TRUE(torch::equal(experts->router_load, load));
  const at::Tensor before = experts->router_bias.clone();
  experts->update_router_bias();
  EXPECT_TRUE(at::allclose(experts->router_bias - before, at::sign(load.mean() - load) * 0.01));
  EXPECT_EQ(experts->router_load.abs().sum().item<double>(), 0);
  const auto spread = [&] {
    experts->forward(x);
    const at::Tensor counts = experts->router_load.clone();
    experts->update_router_bias();
    return (counts.max() - counts.min()).item<double>();
  };
  const double first = spread();
  EXPECT_GT(first, 32);
  for (int step = 0; step < 60; ++step) spread();
  EXPECT_LT(spread(), first / 2);
  EXPECT_FALSE(experts->router_bias.requires_grad());
  // Evaluation does not count.
  experts->eval();
  experts->forward(x);
  EXPECT_EQ(experts->router_load.abs().sum().item<double>(), 0);
}

// ------------------------------------------------------------------------------------------- graphs and
// fakes

// A module whose forward returns what a graph can hold.
struct PlainForwardImpl : torch::nn::Module {
  explicit PlainForwardImpl(const ExpertOptions& options) { inner = register_module("inner", made(options)); }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const BlockResult result = inner->forward(x);
    return {result.hidden, loss_named(result, kBalanceLoss), loss_named(result, kRouterZLoss)};
  }
  Experts inner{nullptr};
};
TORCH_MODULE(PlainForward);

TEST(Experts, CompiledEqualsEager) {
  for (const double factor : {0.0, 0.7}) {
    ExpertOptions options = kSmall;
    options.shared_expert_width = 4;
    options.router_bias_rate = 0.01;
    options.capacity_factor = factor;
    PlainForward plain(options), original(options);
    auto fast = graph::compile(original);
    for (int step = 0; step < 3; ++step) {
      // Another routing in each step: a replay must not keep the one it was captured with.
      const at::Tensor x = random_numbers({2, 9, 6}, 20 + static_cast<std::uint64_t>(step));
      const at::Tensor own = x.clone().set_requires_grad(true), other = x.clone().set_requires_grad(true);
      const auto expected = plain->forward(own);
      const auto actual = fast->forward(other);
      EXPECT_TRUE(torch::equal(std::get<0>(actual), std::get<0>(expected))) << step;
      EXPECT_TRUE(torch::equal(std::get<1>(actual), std::get<1>(expected))) << step;
      EXPECT_TRUE(torch::equal(std::get<2>(actual), std::get<2>(expected))) << step;
      plain->zero_grad();
      fast->zero_grad();
      std::apply(loss_of, expected).backward();
      std::apply(loss_of, actual).backward();
      EXPECT_TRUE(torch::equal(other.grad(), own.grad())) << step;
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(torch::equal(original->named_parameters()[item.key()].grad(), item.value().grad()))
            << step << " " << item.key();
      EXPECT_TRUE(torch::equal(original->inner->router_load, plain->inner->router_load)) << step;
    }
    EXPECT_EQ(fast->captures(), 1u);
    EXPECT_TRUE(has_text(fast->graph_text(), "penstock::grouped_product"));
  }
}

TEST(Experts, CompiledNamesTheLayerOfNanScores) {
  PlainForward original(kSmall);
  auto fast = graph::compile(original);
  at::Tensor x = random_numbers({1, 4, 6}, 11);
  fast->forward(x);
  x = x.clone();
  x[0][2][1] = std::nan("");
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { fast->forward(x); }),
                       "blocks.2.experts: router scores of token 2"));
}

// Neither the weights of the choices nor the sum need the results of the last product.
TEST(Experts, RecomputedEndBeforeTheirLastProduct) {
  struct CountForwardProducts final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      if (op.operator_name().name == "penstock::grouped_product" && !stack->back().toBool()) ++products;
      op.callBoxed(stack);
    }
    int products = 0;
  };
  Experts experts = made(kSmall);
  const at::Tensor x = random_numbers({2, 5, kSmall.width}, 31).set_requires_grad(true);
  const auto gradients = [&](const BlockResult& result) {
    std::vector<at::Tensor> of{x};
    for (const at::Tensor& parameter : experts->parameters()) of.push_back(parameter);
    const at::Tensor loss =
        result.hidden.square().sum() + loss_named(result, kBalanceLoss) + loss_named(result, kRouterZLoss);
    return torch::autograd::grad({loss}, of);
  };
  const std::vector<at::Tensor> plain = gradients(experts->forward(x));
  const BlockResult again =
      recomputed_block(x, [experts](const at::Tensor& in) mutable { return experts->forward(in); });
  CountForwardProducts count;
  std::vector<at::Tensor> recomputed;
  {
    const ModeGuard guard(count);
    recomputed = gradients(again);
  }
  EXPECT_EQ(count.products, 2);  // gate and up
  ASSERT_EQ(recomputed.size(), plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(recomputed[i], plain[i])) << i;
}

TEST(Experts, FakeForwardAndBackward) {
  FakeMode fake;
  const ModeGuard guard(fake);
  Experts experts(ExpertOptions{.width = 1024, .experts = 64, .top_k = 2, .expert_width = 512});
  const at::Tensor x = torch::rand({32, 1024, 1024}).set_requires_grad(true);
  const BlockResult result = experts->forward(x);
  EXPECT_EQ(result.hidden.sizes(), x.sizes());
  result.hidden.sum().backward();
  EXPECT_TRUE(is_fake(experts->gate.grad()));
  EXPECT_EQ(experts->down.grad().sizes(), experts->down.sizes());
}

// -------------------------------------------------------------------------------------------- the module
// itself

TEST(Experts, NanScoresNameTheLayer) {
  Experts experts = made(kSmall);
  at::Tensor x = random_numbers({1, 4, 6}, 11);
  x[0][3].fill_(std::nan(""));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { experts->forward(x); }),
                       "blocks.2.experts: router scores of token 3: got NaN for every expert"));
}

TEST(Experts, RejectsHiddenStatesOfAnotherWidth) {
  Experts experts = made(kSmall);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         experts->forward(random_numbers({1, 4, 5}, 1));
                       }),
                       "blocks.2.experts: hidden states: got 1 x 4 x 5, expected batch x length x 6"));
}

TEST(Experts, ParametersAreThoseOfThePlan) {
  for (const std::int64_t shared : {0, 9}) {
    ExpertOptions options = kSmall;
    options.shared_expert_width = shared;
    options.router_bias_rate = shared > 0 ? 0.01 : 0;
    const Experts experts(options);
    const auto shapes = parameter_shapes(options);
    const auto parameters = experts->named_parameters();
    ASSERT_EQ(parameters.size(), shapes.size());
    std::int64_t count = 0;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      EXPECT_EQ(parameters[i].key(), shapes[i].name);
      EXPECT_EQ(parameters[i].value().sizes().vec(), shapes[i].shape) << shapes[i].name;
      count += parameters[i].value().numel();
    }
    EXPECT_EQ(parameter_count(options), count);
    EXPECT_EQ(experts->named_buffers().contains("router_bias"), shared > 0);
    EXPECT_EQ(parameter_shapes(options, "blocks.0.experts")[0].name, "blocks.0.experts.gate");
  }
}

TEST(Experts, InitialValuesDependOnSeedAndName) {
  Experts one = made(kSmall), same = made(kSmall), other = made(kSmall);
  other->initialize("blocks.3.experts", {.seed = 3, .deviation = 0.4, .residual = 0.3});
  for (const auto& item : one->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), same->named_parameters()[item.key()])) << item.key();
    EXPECT_FALSE(torch::equal(item.value(), other->named_parameters()[item.key()])) << item.key();
  }
  Experts wide(ExpertOptions{.width = 32, .experts = 16, .top_k = 1, .expert_width = 32});
  wide->initialize("x", {.seed = 1, .deviation = 0.5, .residual = 0.1});
  EXPECT_NEAR(wide->gate.std().item<double>(), 0.5, 0.02);
  EXPECT_NEAR(wide->down.std().item<double>(), 0.1, 0.004);
}

TEST(Experts, ClonesAreEqual) {
  ExpertOptions options = kSmall;
  options.router_bias_rate = 0.01;
  options.shared_expert_width = 3;
  Experts experts = made(options);
  experts->router_bias.fill_(0.25);
  const auto copy = std::dynamic_pointer_cast<ExpertsImpl>(experts->clone());
  const at::Tensor x = random_numbers({1, 4, 6}, 12);
  EXPECT_TRUE(torch::equal(copy->forward(x).hidden, experts->forward(x).hidden));
  copy->gate.detach().zero_();
  EXPECT_GT(experts->gate.abs().sum().item<double>(), 0);
}

// ----------------------------------------------------------------------------------------------------
// options

std::string error_of(const ExpertOptions& options) {
  return message_of<ConfigError>([&] { options.check(); });
}

TEST(ExpertOptions, ErrorsNameTheKey) {
  EXPECT_TRUE(has_text(error_of({.experts = 4, .top_k = 5}),
                       "model.top_k: got 5, expected at most the number of experts, 4"));
  EXPECT_TRUE(has_text(error_of({.experts = 0}), "model.experts: got 0, expected at least 1"));
  EXPECT_TRUE(has_text(error_of({.top_k = 0}), "model.top_k: got 0"));
  EXPECT_TRUE(has_text(error_of({.width = -1}), "model.width: got -1"));
  EXPECT_TRUE(has_text(error_of({.expert_width = 0}), "model.expert_width: got 0"));
  EXPECT_TRUE(has_text(error_of({.router_bias_rate = -0.1}), "model.router_bias_rate: got -0.1"));
  EXPECT_TRUE(has_text(error_of({.router_bias_rate = std::nan("")}), "model.router_bias_rate: got nan"));
  EXPECT_TRUE(has_text(error_of({.shared_expert_width = -2}), "model.shared_expert_width: got -2"));
  EXPECT_TRUE(has_text(error_of({.capacity_factor = -1}), "model.capacity_factor: got -1"));
  EXPECT_TRUE(has_text(error_of({.capacity_factor = INFINITY}), "model.capacity_factor: got inf"));
  EXPECT_THROW(Experts(ExpertOptions{.experts = 2, .top_k = 3}), ConfigError);
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { ExpertOptions{.experts = 6}.check_parallel(4); }),
                       "layout.ep: got 4, expected a divisor of model.experts, 6"));
  ExpertOptions{.experts = 6}.check_parallel(3);
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_router_scores("tanh"); }),
                       "model.router_scores: got \"tanh\", expected \"softmax\" or \"sigmoid\""));
  for (const RouterScores scores : {RouterScores::Softmax, RouterScores::Sigmoid})
    EXPECT_EQ(parse_router_scores(to_string(scores)), scores);
}

TEST(ExpertOptions, CountsAndCost) {
  const ExpertOptions options{
      .width = 1024, .experts = 64, .top_k = 2, .expert_width = 512, .shared_expert_width = 256};
  EXPECT_EQ(parameter_count(options), 64 * 1024 + 64 * 3 * 1024 * 512 + 3 * 1024 * 256);
  EXPECT_EQ(active_parameter_count(options), 64 * 1024 + 2 * 3 * 1024 * 512 + 3 * 1024 * 256);
  EXPECT_EQ(flops_per_token(options), 2.0 * (64 * 1024 + 2 * 3 * 1024 * 512 + 3 * 1024 * 256));
  EXPECT_EQ(expert_capacity(options, 100), 0);
  EXPECT_EQ(expert_capacity({.experts = 8, .top_k = 2, .capacity_factor = 1.25}, 100), 32);  // 31.25
  EXPECT_EQ(expert_capacity({.experts = 8, .top_k = 1, .capacity_factor = 0.01}, 1), 1);
}

}  // namespace experts_test
}  // namespace penstock::models
