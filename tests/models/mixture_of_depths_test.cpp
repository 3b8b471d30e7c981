#include "penstock/models/blocks/mixture_of_depths.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "penstock/errors.h"
#include "penstock/models/blocks/attention.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/models/blocks/tree_feed_forward.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace mixture_of_depths_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kWidth = 6;

MixtureOfDepths wrapper(DepthKind kind, double capacity, at::ScalarType dtype = at::kDouble) {
  MixtureOfDepths depth(DepthOptions{.width = kWidth, .capacity = capacity, .kind = kind});
  depth->to(dtype);
  depth->initialize("blocks.0.depth", {.seed = 3, .deviation = 0.7});
  return depth;
}

// The places of the k largest of a row, ascending.
std::vector<std::int64_t> best_of(const at::Tensor& scores, std::int64_t k) {
  std::vector<std::int64_t> places(static_cast<std::size_t>(scores.size(0)));
  std::iota(places.begin(), places.end(), 0);
  std::sort(places.begin(), places.end(), [&](std::int64_t a, std::int64_t b) {
    return scores[a].item<double>() > scores[b].item<double>();
  });
  places.resize(static_cast<std::size_t>(k));
  std::sort(places.begin(), places.end());
  return places;
}

// A block that mixes a token with those before it in the rows it is given: the mean of tanh(W x) so far.
at::Tensor running_mean(const at::Tensor& rows, const at::Tensor& matrix) {
  const at::Tensor states = at::tanh(at::matmul(rows, matrix));
  const at::Tensor counts = at::arange(1, rows.size(1) + 1, rows.options()).view({1, -1, 1});
  return states.cumsum(1) / counts;
}

// Row by row and token by token, by the definition.
at::Tensor by_definition(MixtureOfDepthsImpl& depth, const at::Tensor& x, const at::Tensor& matrix,
                         at::Tensor& loss) {
  std::vector<at::Tensor> rows;
  loss = at::zeros({}, x.options());
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    const at::Tensor logits = at::mv(x[row], depth.router->weight[0]) + depth.router->bias;
    const auto places = best_of(
        logits,
        std::max<std::int64_t>(1, std::llround(depth.options().capacity * static_cast<double>(x.size(1)))));
    std::vector<at::Tensor> given, tokens;
    for (const std::int64_t place : places) given.push_back(x[row][place]);
    const at::Tensor added = running_mean(at::stack(given).unsqueeze(0), matrix)[0];
    for (std::int64_t place = 0; place < x.size(1); ++place) {
      const auto found = std::find(places.begin(), places.end(), place);
      const at::Tensor p = 1 / (1 + (-logits[place]).exp());
      loss = loss - (found == places.end() ? (1 - p).log() : p.log());
      if (found == places.end()) {
        tokens.push_back(x[row][place]);
        continue;
      }
      at::Tensor term = added[found - places.begin()] * p;
      if (depth.gamma.defined()) term = term * depth.gamma;
      tokens.push_back(x[row][place] + term);
    }
    rows.push_back(at::stack(tokens));
  }
  loss = loss / static_cast<double>(x.size(0) * x.size(1));
  return at::stack(rows);
}

TEST(MixtureOfDepths, EqualsTheDefinitionWithItsGradients) {
  std::uint64_t seed = 0;
  for (const DepthKind kind : {DepthKind::Plain, DepthKind::Gamma})
    for (const double capacity : {0.01, 0.4, 1.0})
      for (const auto& [batch, length] : {std::pair{1, 1}, {2, 7}, {3, 5}}) {
        SCOPED_TRACE(testing::Message() << to_text(kind) << " " << capacity << " " << batch << "x" << length);
        MixtureOfDepths depth = wrapper(kind, capacity);
        const at::Tensor x = leaf(random_tensor({batch, length, kWidth}, ++seed)),
                         matrix = leaf(random_tensor({kWidth, kWidth}, ++seed));
        const auto block = [&](const at::Tensor& rows, const ChosenTokens&) {
          return BlockResult{running_mean(rows, matrix)};
        };
        const BlockResult result = depth->forward(scattered(x.detach()).copy_(x.detach()), block);
        ASSERT_EQ(result.losses.size(), 1u);
        EXPECT_EQ(result.losses[0].name, "depth_router");
        const BlockResult own = depth->forward(x, block);
        EXPECT_LT(apart(result.hidden, own.hidden), 1e-14);
        at::Tensor loss;
        const at::Tensor expected = by_definition(*depth, x, matrix, loss);
        Tensors of{x, matrix};
        for (const at::Tensor& parameter : depth->parameters()) of.push_back(parameter);
        expect_gradients({own.hidden, own.losses[0].value}, {expected, loss}, of);
      }
}

TEST(MixtureOfDepths, LossesOfTheBlockKeepTheirNames) {
  MixtureOfDepths depth = wrapper(DepthKind::Plain, 0.5);
  const at::Tensor x = leaf(random_tensor({2, 6, kWidth}, 1));
  const auto block = [](const at::Tensor& rows, const ChosenTokens&) {
    return BlockResult{rows * 2, {{kBalanceLoss, rows.mean()}, {kRouterZLoss, rows.pow(2).mean()}}};
  };
  const BlockResult result = depth->forward(x, block);
  ASSERT_EQ(result.losses.size(), 3u);
  EXPECT_EQ(result.losses[0].name, "balance");
  EXPECT_EQ(result.losses[1].name, "router_z");
  EXPECT_EQ(result.losses[2].name, "depth_router");
  for (const NamedLoss& loss : result.losses) {
    EXPECT_EQ(loss.value.dim(), 0);
    EXPECT_TRUE(gradients({loss.value}, {x})[0].defined()) << loss.name;
  }
  EXPECT_TRUE(depth->forward(x, block, DepthChoice::Threshold).losses.empty());
}

// Documents, rotary positions and parents go with the tokens.
TEST(ChosenTokens, WhatBelongsToTokensTravelsWithThem) {
  const at::Tensor scores =
      torch::tensor({{0.1, 3.0, -1.0, 2.0, 0.5}, {9.0, 8.0, 1.0, 0.0, 7.0}}, at::kDouble);
  const ChosenTokens chosen = ChosenTokens::highest(scores, 3);
  EXPECT_TRUE(at::equal(chosen.positions(), numbers({{1, 3, 4}, {0, 1, 4}})));
  EXPECT_FALSE(chosen.active().defined());
  EXPECT_TRUE(at::equal(chosen.of_tokens(numbers({{10, 11, 12, 13, 14}, {20, 21, 22, 23, 24}})),
                        numbers({{11, 13, 14}, {20, 21, 24}})));
  EXPECT_FALSE(chosen.of_tokens({}).defined());
  const at::Tensor table = random_tensor({5, 1, 2}, 4);
  EXPECT_TRUE(at::equal(chosen.of_positions(table)[1][2], table[4]));
  // Token 3 refers to 1, which is chosen; 4 refers to 2, which is not; 1 refers to nothing.
  EXPECT_TRUE(at::equal(chosen.of_references(numbers({{-1, -1, 1, 1, 2}, {-1, 0, 1, 2, 1}})),
                        numbers({{-1, 0, -1}, {-1, 0, 1}})));
  const ChosenTokens positive = ChosenTokens::positive(scores - 0.4);
  EXPECT_TRUE(at::equal(positive.positions(), numbers({{1, 3, 4, 0, 2}, {0, 1, 2, 4, 3}})));
  EXPECT_TRUE(at::equal(positive.active().to(at::kLong), numbers({{1, 1, 1, 0, 0}, {1, 1, 1, 1, 0}})));
}

// Attention of the chosen tokens, with positions and documents of their own, equals attention of the whole
// row in which the other tokens cannot be seen.
TEST(MixtureOfDepths, AroundAttentionWithDocuments) {
  const std::int64_t batch = 2, length = 9, head_width = 4;
  Rotary rotary(head_width, length, 100);
  MixtureOfDepths depth = wrapper(DepthKind::Plain, 0.6);
  const at::Tensor x = random_tensor({batch, length, kWidth}, 8), q_weight = random_tensor({kWidth, 4}, 9),
                   k_weight = random_tensor({kWidth, 4}, 10), v_weight = random_tensor({kWidth, kWidth}, 11);
  const at::Tensor documents = numbers({{0, 0, 0, 0, 1, 1, 1, 1, 1}, {3, 3, 3, 3, 3, 3, 3, 4, 4}});
  const at::Tensor turns = rotary.turns(0, length, x);
  const auto rotated = [](const at::Tensor& rows, const at::Tensor& by) {  // [batch, n, 4] by [batch, n, 2]
    return at::view_as_real(at::view_as_complex(rows.reshape({rows.size(0), rows.size(1), 2, 2})) * by)
        .flatten(2);
  };
  const auto attention = [&](const at::Tensor& rows, const at::Tensor& by, const at::Tensor& visible) {
    const at::Tensor scores = at::matmul(rotated(at::matmul(rows, q_weight), by),
                                         rotated(at::matmul(rows, k_weight), by).transpose(1, 2));
    return at::matmul(at::softmax(scores.masked_fill(visible.logical_not(), -INFINITY), -1),
                      at::matmul(rows, v_weight));
  };
  const auto causal = [](const at::Tensor& owners) {
    const at::Tensor places = at::arange(owners.size(1));
    return owners.unsqueeze(2)
        .eq(owners.unsqueeze(1))
        .logical_and(places.unsqueeze(1).ge(places.unsqueeze(0)));
  };
  at::Tensor taken;
  const BlockResult result = depth->forward(x, [&](const at::Tensor& rows, const ChosenTokens& chosen) {
    taken = at::zeros({batch, length}, at::kBool).scatter(1, chosen.positions(), true);
    return BlockResult{
        attention(rows, chosen.of_positions(turns).squeeze(2), causal(chosen.of_tokens(documents)))};
  });
  EXPECT_EQ(taken.sum().item<std::int64_t>(), batch * 5);  // 0.6 * 9, rounded
  const at::Tensor visible =
      causal(documents)
          .logical_and(taken.unsqueeze(1))
          .logical_or(at::eye(length, at::kBool).unsqueeze(0));  // a row without keys would be NaN
  const at::Tensor whole = attention(x, turns.squeeze(1).unsqueeze(0), visible);
  const at::Tensor gate = at::sigmoid(at::matmul(x, depth->router->weight[0]) + depth->router->bias);
  EXPECT_LT(apart(result.hidden, x + whole * gate.unsqueeze(-1) * taken.unsqueeze(-1)), 1e-12);
}

// In generation the choice of a token depends on the token alone: one token after another, with a state that
// only active tokens change, equals the whole row.
TEST(MixtureOfDepths, OneTokenAtATimeEqualsTheWholeRow) {
  for (const DepthKind kind : {DepthKind::Plain, DepthKind::Gamma}) {
    const at::NoGradGuard no_grad;
    MixtureOfDepths depth = wrapper(kind, 0.5);
    const at::Tensor x = random_tensor({3, 12, kWidth}, 21), matrix = random_tensor({kWidth, kWidth}, 22);
    at::Tensor active;
    const at::Tensor whole = depth
                                 ->forward(
                                     x,
                                     [&](const at::Tensor& rows, const ChosenTokens& chosen) {
                                       active = chosen.active();
                                       at::Tensor added = running_mean(rows, matrix);
                                       // What is computed for the others must not matter, whatever it is.
                                       added = added.masked_fill(active.logical_not().unsqueeze(-1), NAN);
                                       return BlockResult{added};
                                     },
                                     DepthChoice::Threshold)
                                 .hidden;
    EXPECT_TRUE(at::isfinite(whole).all().item<bool>());
    EXPECT_TRUE(active.any().item<bool>());
    EXPECT_FALSE(active.all().item<bool>());
    EXPECT_EQ(whole.eq(x).all(-1).sum().item<std::int64_t>(),
              active.logical_not().sum().item<std::int64_t>());
    at::Tensor sum = at::zeros({3, kWidth}, at::kDouble), count = at::zeros({3, 1}, at::kDouble);
    for (std::int64_t place = 0; place < x.size(1); ++place) {
      const BlockResult step = depth->forward(
          x.narrow(1, place, 1),
          [&](const at::Tensor& rows, const ChosenTokens& chosen) {
            sum = kept_state(sum, sum + at::tanh(at::matmul(rows, matrix)).squeeze(1), chosen);
            count = kept_state(count, count + 1, chosen);
            return BlockResult{(sum / count.clamp_min(1)).unsqueeze(1)};
          },
          DepthChoice::Threshold);
      EXPECT_LT(apart(step.hidden, whole.narrow(1, place, 1)), 1e-13) << "token " << place;
    }
  }
}

// Following the loss alone, the threshold learns to choose what the capacity chooses.
TEST(MixtureOfDepths, TheLossMakesThresholdAndCapacityAgree) {
  MixtureOfDepths depth = wrapper(DepthKind::Plain, 0.25);
  const at::Tensor x = random_tensor({4, 32, kWidth}, 5);
  const auto nothing = [](const at::Tensor& rows, const ChosenTokens&) {
    return BlockResult{at::zeros_like(rows)};
  };
  const auto disagreements = [&] {
    const at::Tensor logits = at::matmul(x, depth->router->weight[0]) + depth->router->bias;
    const at::Tensor best =
        at::zeros({4, 32}, at::kBool).scatter(1, ChosenTokens::highest(logits, 8).positions(), true);
    return logits.gt(0).ne(best).sum().item<std::int64_t>();
  };
  const std::int64_t before = disagreements();
  torch::optim::SGD optimizer(depth->parameters(), 1.0);
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    depth->forward(x, nothing).losses.back().value.backward();
    optimizer.step();
  }
  EXPECT_GT(before, 20);
  EXPECT_LT(disagreements(), 16);  // of 128; rows differ in where their capacity cuts
}

TEST(MixtureOfDepths, AroundATreeFeedForward) {
  MixtureOfDepths depth = wrapper(DepthKind::Gamma, 0.5);
  TreeFeedForward feed(TreeFeedOptions{.width = kWidth, .feed_width = 8});
  feed->to(at::kDouble);
  feed->initialize("feed", {.seed = 1, .deviation = 0.4, .residual = 0.4});
  {
    const at::NoGradGuard no_grad;
    feed->mix.fill_(0.7);
  }
  const at::Tensor x = random_tensor({2, 8, kWidth}, 31),
                   parents = numbers({{-1, 0, 0, 1, 3, 3, 2, 6}, {-1, 0, 1, 2, 3, 4, 5, 6}});
  at::Tensor inner;
  const BlockResult result = depth->forward(x, [&](const at::Tensor& rows, const ChosenTokens& chosen) {
    inner = chosen.of_references(parents);
    return BlockResult{feed->forward(rows, {.parents = inner})};
  });
  EXPECT_TRUE(inner.ge(0).any().item<bool>());
  EXPECT_EQ(result.hidden.sizes(), x.sizes());
  EXPECT_EQ(result.hidden.ne(x).any(-1).sum().item<std::int64_t>(), 8);
}

TEST(MixtureOfDepths, CapturedEqualsEager) {
  for (const DepthKind kind : {DepthKind::Plain, DepthKind::Gamma})
    for (const DepthChoice choice : {DepthChoice::Capacity, DepthChoice::Threshold}) {
      const auto make = [=] {
        MixtureOfDepths depth = wrapper(kind, 0.4, at::kFloat);
        const auto call = [depth, choice](const Tensors& in) mutable {
          const BlockResult result = depth->forward(
              in[0],
              [&](const at::Tensor& rows, const ChosenTokens& chosen) {
                const at::Tensor own = chosen.of_tokens(in[1]).unsqueeze(-1).to(rows.scalar_type());
                return BlockResult{at::tanh(rows + own), {{kBalanceLoss, rows.pow(2).mean()}}};
              },
              choice);
          Tensors all{result.hidden};
          for (const NamedLoss& loss : result.losses) all.push_back(loss.value);
          return all;
        };
        return std::make_shared<CalledModule>(std::vector<std::shared_ptr<torch::nn::Module>>{depth.ptr()},
                                              call);
      };
      expect_captured(make, {leaf(random_tensor({2, 9, kWidth}, 41, at::kFloat)), random_ids(4, {2, 9}, 42)});
    }
}

TEST(MixtureOfDepths, SixteenBitsAndAutocast) {
  const auto block = [](const at::Tensor& rows, const ChosenTokens&) { return BlockResult{at::tanh(rows)}; };
  const at::Tensor x = random_tensor({2, 16, kWidth}, 51, at::kBFloat16);
  MixtureOfDepths depth = wrapper(DepthKind::Gamma, 0.5, at::kFloat);
  const BlockResult low = depth->forward(leaf(x), block), high = depth->forward(x.to(at::kFloat), block);
  EXPECT_EQ(low.hidden.scalar_type(), at::kBFloat16);
  EXPECT_EQ(low.losses[0].value.scalar_type(), at::kFloat);
  // Logits are the same float32 numbers, hence the choice is, too.
  EXPECT_TRUE(at::equal(low.losses[0].value, high.losses[0].value));
  EXPECT_LT(apart(low.hidden, high.hidden), 0.01);
  const AutocastScope scope(at::kCPU, at::kBFloat16);
  EXPECT_TRUE(at::equal(depth->forward(x, block).losses[0].value, high.losses[0].value));
}

TEST(MixtureOfDepths, ParametersAndInitialValues) {
  for (const DepthKind kind : {DepthKind::Plain, DepthKind::Gamma}) {
    MixtureOfDepths depth = wrapper(kind, 0.5), again = wrapper(kind, 0.5);
    expect_shapes(*depth, depth->options().shapes(""));
    EXPECT_EQ(depth->options().parameter_count(), kind == DepthKind::Plain ? kWidth + 1 : 2 * kWidth + 1);
    EXPECT_TRUE(at::equal(depth->router->weight, again->router->weight));
    again->initialize("blocks.1.depth", {.seed = 3, .deviation = 0.7});
    EXPECT_FALSE(at::equal(depth->router->weight, again->router->weight));
    const at::Tensor x = random_tensor({2, 6, kWidth}, 61);
    expect_copies(depth, [&](MixtureOfDepthsImpl& each) {
      return each.forward(x, [](const at::Tensor& rows, const ChosenTokens&) { return BlockResult{rows}; })
          .hidden;
    });
  }
  EXPECT_EQ((DepthOptions{.capacity = 0.25}.chosen(4096)), 1024);
  EXPECT_EQ((DepthOptions{.capacity = 0.01}.chosen(10)), 1);
  EXPECT_EQ((DepthOptions{.capacity = 1}.chosen(10)), 10);
}

TEST(MixtureOfDepths, WithoutResidual) {
  const at::Tensor rows = random_tensor({1, 2, 3}, 1), added = random_tensor({1, 2, 3}, 2);
  const BlockResult result = without_residual({rows + added, {{"mine", added.sum()}}}, rows);
  EXPECT_LT(apart(result.hidden, added), 1e-14);
  EXPECT_EQ(result.losses.at(0).name, "mine");
}

TEST(MixtureOfDepths, BadInputSaysWhatIsWanted) {
  const auto option = [](DepthOptions options) {
    return message_of<ConfigError>([&] { MixtureOfDepths{options}; });
  };
  EXPECT_TRUE(has_text(option({.capacity = 0}), "model.depth_capacity: got 0"));
  EXPECT_TRUE(has_text(option({.capacity = 1.5}), "at most 1"));
  EXPECT_TRUE(has_text(option({.capacity = NAN}), "model.depth_capacity"));
  EXPECT_TRUE(has_text(option({.gamma = 0}), "model.depth_gamma"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { depth_kind_from("delta"); }), "plain or gamma"));
  EXPECT_EQ(depth_kind_from(to_text(DepthKind::Gamma)), DepthKind::Gamma);
  EXPECT_EQ(depth_kind_from(to_text(DepthKind::Plain)), DepthKind::Plain);
  MixtureOfDepths depth = wrapper(DepthKind::Plain, 0.5);
  const auto block = [](const at::Tensor& rows, const ChosenTokens&) {
    return BlockResult{rows.narrow(1, 0, 1)};
  };
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         depth->forward(at::zeros({2, 4, 5}), block);
                       }),
                       "hidden states [batch, length, 6]"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         depth->forward(random_tensor({2, 4, kWidth}, 1), block);
                       }),
                       "got Double [2, 1, 6], expected a tensor like the chosen rows, Double [2, 2, 6]"));
  const ChosenTokens chosen = ChosenTokens::highest(at::rand({2, 4}), 2);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { chosen.of_tokens(at::zeros({2, 5})); }), "[2, 4, ...]"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { chosen.of_positions(at::zeros({5})); }), "[4, ...]"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         chosen.of_references(at::zeros({2, 4}));
                       }),
                       "Long or Int"));
  EXPECT_TRUE(has_text(message_of<ValueError>([] {
                         ChosenTokens::highest(at::rand({2, 4}), 5);
                       }),
                       "at most length"));
}

}  // namespace mixture_of_depths_test
}  // namespace penstock::models
