#include "penstock/models/blocks/multi_token_prediction.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "penstock/errors.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace multi_token_prediction_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kWidth = 6, kVocabulary = 11;

MultiTokenPrediction made_prediction(std::int64_t depth, NormKind norm = NormKind::RmsNorm,
                                     at::ScalarType dtype = at::kDouble) {
  MultiTokenPrediction more(MultiTokenOptions{.depth = depth, .norm = {.kind = norm, .width = kWidth}});
  more->to(dtype);
  more->initialize("multi_token", {.seed = 2, .deviation = 0.5});
  return more;
}

// The parts of a model: an embedding that is also the head, and a block that mixes a row causally.
struct SmallParts {
  at::Tensor embed = leaf(random_tensor({kVocabulary, kWidth}, 91)),
             matrix = leaf(random_tensor({kWidth, kWidth}, 92));
  at::Tensor mixed(const at::Tensor& rows) const {
    return rows + at::tanh(at::matmul(rows.cumsum(1), matrix));
  }
  MultiTokenParts parts() const {
    return {.embed = [this](const at::Tensor& tokens) { return at::embedding(embed, tokens); },
            .head = [this](const at::Tensor& hidden) { return at::matmul(hidden, embed.t()); },
            .block =
                [this](std::int64_t d, const at::Tensor& rows) {
                  return BlockResult{mixed(rows), {{"inner", rows.mean() * d}}};
                }};
  }
};

at::Tensor rms(const at::Tensor& x) { return x / (x.pow(2).mean(-1, true) + 1e-5).sqrt(); }

// Row by row; a row ends where its tokens do.
at::Tensor by_definition(const MultiTokenPredictionImpl& more, const SmallParts& model,
                         const at::Tensor& hidden, const MultiTokenBatch& batch) {
  const auto parameters = more.named_parameters();
  at::Tensor total = at::zeros({}, at::kDouble);
  std::vector<at::Tensor> h;
  for (std::int64_t row = 0; row < hidden.size(0); ++row) h.push_back(hidden[row]);
  const std::int64_t length = hidden.size(1);
  for (std::int64_t d = 1; d <= more.options().depth; ++d) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    std::int64_t count = 0;
    for (std::int64_t row = 0; row < hidden.size(0); ++row) {
      std::vector<at::Tensor> given;
      for (std::int64_t t = 0; t + d < length; ++t) {
        const at::Tensor token = model.embed[batch.tokens[row][t + d].item<std::int64_t>()];
        const at::Tensor both = at::cat({rms(h[static_cast<std::size_t>(row)][t]), rms(token)});
        given.push_back(at::mv(*parameters.find(fmt::format("steps.{}.project.weight", d - 1)), both));
      }
      if (given.empty()) continue;
      h[static_cast<std::size_t>(row)] = model.mixed(at::stack(given).unsqueeze(0))[0];
      for (std::int64_t t = 0; t + d < length; ++t) {
        const auto target = batch.targets[row][t + d].item<std::int64_t>();
        bool counts = target != batch.ignored;
        for (std::int64_t i = 1; batch.documents.defined() && i <= d; ++i)
          counts = counts && batch.documents[row][t + i].item<std::int64_t>() ==
                                 batch.documents[row][t].item<std::int64_t>();
        if (!counts) continue;
        const at::Tensor logits = at::mv(model.embed, h[static_cast<std::size_t>(row)][t]);
        sum = sum + logits.exp().sum().log() - logits[target];
        ++count;
      }
    }
    if (count > 0) total = total + sum / count;
  }
  return total / more.options().depth;
}

TEST(MultiTokenPrediction, EqualsTheDefinitionWithItsGradients) {
  std::uint64_t seed = 0;
  for (const std::int64_t depth : {1, 2, 3})
    for (const auto& [batch, length] : {std::pair{1, 5}, {2, 4}, {3, 2}})
      for (const bool with_documents : {false, true}) {
        SCOPED_TRACE(testing::Message() << depth << " " << batch << "x" << length << " " << with_documents);
        MultiTokenPrediction more = made_prediction(depth);
        const SmallParts model;
        const at::Tensor hidden = leaf(random_tensor({batch, length, kWidth}, ++seed));
        MultiTokenBatch given{.tokens = random_ids(kVocabulary, {batch, length}, ++seed),
                              .targets = random_ids(kVocabulary, {batch, length}, ++seed)};
        given.targets.masked_fill_(random_ids(4, {batch, length}, ++seed).eq(0), given.ignored);
        if (with_documents) given.documents = random_ids(3, {batch, length}, ++seed).eq(0).cumsum(1);
        const auto losses = more->forward(hidden, given, model.parts());
        ASSERT_EQ(losses.size(), 1u + static_cast<std::size_t>(std::min(depth, std::int64_t{length} - 1)));
        EXPECT_EQ(losses[0].name, "multi_token");
        EXPECT_EQ(losses[1].name, "inner");
        EXPECT_EQ(losses[0].value.dim(), 0);
        const at::Tensor expected = by_definition(*more, model, hidden, given);
        Tensors of{hidden, model.embed, model.matrix};
        if (expected.requires_grad()) expect_gradients({losses[0].value}, {expected}, of);
        EXPECT_LT(apart(losses[0].value, expected), 1e-12);
      }
}

// A number of a document that occurs again is another document in between.
TEST(MultiTokenPrediction, NothingCrossesADocument) {
  MultiTokenPrediction more = made_prediction(2);
  const SmallParts model;
  const at::Tensor hidden = random_tensor({1, 5, kWidth}, 1);
  const MultiTokenBatch batch{.tokens = random_ids(kVocabulary, {1, 5}, 2),
                              .targets = random_ids(kVocabulary, {1, 5}, 3),
                              .documents = numbers({{0, 1, 0, 1, 0}})};
  EXPECT_EQ(more->forward(hidden, batch, model.parts())[0].value.item<double>(), 0);
  EXPECT_GT(more->forward(hidden, {.tokens = batch.tokens, .targets = batch.targets}, model.parts())[0]
                .value.item<double>(),
            0.1);
}

// Teacher forcing sees the tokens up to t + d, and none after.
TEST(MultiTokenPrediction, PredictionsDoNotSeeTheirTargets) {
  MultiTokenPrediction more = made_prediction(2);
  const SmallParts model;
  const at::Tensor hidden = random_tensor({1, 6, kWidth}, 1), tokens = random_ids(kVocabulary, {1, 6}, 2);
  std::vector<at::Tensor> seen;
  MultiTokenParts parts = model.parts();
  parts.head = [&](const at::Tensor& rows) {
    seen.push_back(rows.detach());
    return at::matmul(rows, model.embed.t());
  };
  at::Tensor changed = tokens.clone();
  changed[0][4] = (changed[0][4] + 1) % kVocabulary;
  for (const at::Tensor& each : {tokens, changed})
    more->forward(hidden, {.tokens = each, .targets = tokens}, parts);
  ASSERT_EQ(seen.size(), 4u);
  for (std::int64_t d = 1; d <= 2; ++d) {
    const at::Tensor different =
        seen[static_cast<std::size_t>(d) - 1].ne(seen[static_cast<std::size_t>(d) + 1]).any(-1)[0];
    for (std::int64_t t = 0; t < 6 - d; ++t)
      EXPECT_EQ(different[t].item<bool>(), t + d >= 4) << "depth " << d << ", token " << t;
  }
}

TEST(MultiTokenPrediction, ShortRowsAndIgnoredTargetsAreZero) {
  MultiTokenPrediction more = made_prediction(2);
  const SmallParts model;
  const auto loss = [&](std::int64_t length) {
    const at::Tensor hidden = leaf(random_tensor({2, length, kWidth}, 1));
    return more
        ->forward(hidden,
                  {.tokens = random_ids(kVocabulary, {2, length}, 2),
                   .targets = at::full({2, length}, -100, at::kLong)},
                  model.parts())[0]
        .value;
  };
  EXPECT_EQ(loss(1).item<double>(), 0);
  const at::Tensor none = loss(5);
  EXPECT_EQ(none.item<double>(), 0);
  EXPECT_EQ(gradients({none}, {model.embed})[0].abs().max().item<double>(), 0);
}

TEST(MultiTokenPrediction, CapturedEqualsEager) {
  for (const NormKind norm : {NormKind::RmsNorm, NormKind::DynamicTanh}) {
    const auto make = [=] {
      MultiTokenPrediction more = made_prediction(2, norm, at::kFloat);
      torch::nn::Embedding embed(kVocabulary, kWidth);
      {
        const at::NoGradGuard no_grad;
        embed.ptr()->weight.copy_(random_tensor({kVocabulary, kWidth}, 5, at::kFloat));
      }
      return std::make_shared<CalledModule>(
          std::vector<std::shared_ptr<torch::nn::Module>>{more.ptr(), embed.ptr()},
          [more, embed](const Tensors& in) mutable {
            Tensors all;
            for (const NamedLoss& loss : more->forward(
                     in[0], {.tokens = in[1], .targets = in[2], .documents = in[3]},
                     {.embed = [&](const at::Tensor& ids) { return embed->forward(ids); },
                     .head = [&](const at::Tensor& rows) { return at::linear(rows, embed->weight); },
                     .block =
                          [](std::int64_t, const at::Tensor& rows) {
                            return BlockResult{at::tanh(rows), {{"inner", rows.pow(2).mean()}}};
                          }}))
              all.push_back(loss.value);
            return all;
          });
    };
    const at::Tensor hidden = leaf(random_tensor({2, 6, kWidth}, 1, at::kFloat)),
                     tokens = random_ids(kVocabulary, {2, 6}, 2),
                     targets = random_ids(kVocabulary, {2, 6}, 3);
    expect_captured(make, {hidden, tokens, targets, at::Tensor()});
    expect_captured(make, {hidden, tokens, targets, numbers({{0, 0, 0, 0, 1, 1}, {3, 3, 3, 3, 3, 3}})});
  }
}

TEST(MultiTokenPrediction, OptionsAndBadInput) {
  MultiTokenPrediction more = made_prediction(3, NormKind::DynamicTanh);
  expect_shapes(*more, more->options().shapes(""));
  EXPECT_EQ(more->options().parameter_count(), 3 * (2 * (2 * kWidth + 1) + 2 * kWidth * kWidth));
  const SmallParts model;
  const at::Tensor hidden = random_tensor({2, 5, kWidth}, 1), tokens = random_ids(kVocabulary, {2, 5}, 2);
  expect_copies(more, [&](MultiTokenPredictionImpl& each) {
    return each.forward(hidden, {.tokens = tokens, .targets = tokens}, model.parts())[0].value.detach();
  });
  const auto message = [&](const MultiTokenBatch& batch, const MultiTokenParts& parts) {
    return message_of<ValueError>([&] { more->forward(hidden, batch, parts); });
  };
  EXPECT_TRUE(has_text(message({.tokens = tokens, .targets = tokens.narrow(1, 0, 4)}, model.parts()),
                       "targets: got Long [2, 4], expected targets [2, 5]"));
  EXPECT_TRUE(
      has_text(message({.tokens = tokens.to(at::kFloat), .targets = tokens}, model.parts()), "tokens"));
  EXPECT_TRUE(
      has_text(message({.tokens = tokens, .targets = tokens.to(at::kInt)}, model.parts()), "expected Long"));
  EXPECT_TRUE(has_text(message({.tokens = tokens, .targets = tokens, .documents = tokens[0]}, model.parts()),
                       "documents: got Long [5]"));
  MultiTokenParts wrong = model.parts();
  wrong.block = [](std::int64_t, const at::Tensor& rows) { return BlockResult{rows.narrow(2, 0, 1)}; };
  EXPECT_TRUE(has_text(message({.tokens = tokens, .targets = tokens}, wrong),
                       "result of block 1: got Double [2, 4, 1]"));
  wrong = model.parts();
  wrong.head = [](const at::Tensor& rows) { return rows.flatten(0, 1); };
  EXPECT_TRUE(has_text(message({.tokens = tokens, .targets = tokens}, wrong), "[2, 4, vocabulary]"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { MultiTokenPrediction{MultiTokenOptions{.depth = 0}}; }),
                       "model.multi_token_depth"));
}

}  // namespace multi_token_prediction_test
}  // namespace penstock::models
