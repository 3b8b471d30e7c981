// Multi-token prediction in a hybrid model: its loss against the definition, its gradients, its stages; and
// the bias that balances experts.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/errors.h"
#include "penstock/hybrid.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "tests/has_text.h"
#include "tests/models/block_checks.h"
#include "tests/models/small_hybrid.h"
#include "tests/models/small_model.h"
#include "tests/throws.h"

namespace penstock::models {
namespace hybrid_multi_token_test {

using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

constexpr std::int64_t kVocabulary = 13, kWidth = 8;

HybridOptions predicting(const std::string& pattern, std::int64_t depth, const std::string& block = "",
                         bool tie = false) {
  HybridOptions options{
      .pattern = pattern, .vocabulary = kVocabulary, .width = kWidth, .context = 16, .tie_head = tie};
  options.heads = 2;
  options.feed_width = 12;
  options.state_size = 4;
  options.state_head_width = 8;
  options.state_chunk = 4;
  options.experts = 4;
  options.expert_width = 6;
  options.balance_weight = 0.3;
  options.router_z_weight = 0.1;
  options.multi_token_depth = depth;
  options.multi_token_block = block;
  options.multi_token_weight = 0.4;
  return options;
}

HybridStage built(const HybridOptions& options, const StagePart& part, at::ScalarType dtype = at::kDouble) {
  return enlarged_stage(options, part, dtype, 9);
}
HybridStage built(const HybridOptions& options, at::ScalarType dtype = at::kDouble) {
  return built(options, whole_model(options), dtype);
}

// Rows of a text with documents; the last token of a document has no target.
struct Text {
  at::Tensor tokens = random_ids(kVocabulary, {2, 9}, 4);
  at::Tensor documents = numbers({{1, 1, 1, 1, 1, 2, 2, 2, 2}, {5, 5, 6, 6, 6, 6, 6, 5, 5}});
  at::Tensor targets = numbers({{3, 1, 4, 1, -100, 5, 9, 2, 6}, {5, -100, 5, 8, 9, 7, -100, 9, 3}});
  Tree keywords(bool with_documents = true) const {
    std::vector<Tree::Item> items{{"tokens", tokens}, {"targets", targets}};
    if (with_documents) items.push_back({"documents", documents});
    return Tree::dict(items);
  }
};

TEST(HybridMultiToken, ParametersAreThoseOfThePlan) {
  for (const char* block : {"", "A", "M", "E", "F"})
    for (const bool tie : {false, true}) {
      SCOPED_TRACE(block);
      const HybridOptions options = predicting("AF", 2, block, tie);
      HybridStage model(options);
      expect_shapes(*model, parameter_shapes(options));
      const ModelPlan plan = options.plan();
      EXPECT_EQ(plan.tied, std::vector<std::string>{"embed.weight"});
      EXPECT_GT(plan.head_flops_per_token, 3 * predicting("AF", 0, "", tie).plan().head_flops_per_token);
      // Two of four experts are idle in each of the two blocks.
      EXPECT_EQ(parameter_count(plan) - active_parameter_count(plan),
                std::string(block) == "E" ? 2 * 2 * 3 * kWidth * 6 : 0);
    }
}

at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) {
  return x / (x.pow(2).mean(-1, true) + 1e-5).sqrt() * weight;
}

// Position by position: the hidden states of the model, the true token after each, a feed-forward block, and
// the norm and head of the model.
at::Tensor loss_by_definition(HybridStage& model, const at::Tensor& hidden, const Text& text) {
  const auto p = model->named_parameters();
  const at::Tensor& head = model->options().tie_head ? p["embed.weight"] : p["head.weight"];
  at::Tensor h = hidden, total = at::zeros({}, at::kDouble);
  for (std::int64_t d = 1; d <= model->options().multi_token_depth; ++d) {
    const std::string step = "multi_token.steps." + std::to_string(d - 1) + ".",
                      block = "blocks." + std::to_string(1 + d) + ".";
    const std::int64_t length = hidden.size(1) - d;
    const at::Tensor next = p["embed.weight"].index({text.tokens.narrow(1, d, length)});
    const at::Tensor both = at::cat({normed(h.narrow(1, 0, length), p[step + "hidden_norm.weight"]),
                                     normed(next, p[step + "token_norm.weight"])},
                                    -1);
    const at::Tensor in = at::matmul(both, p[step + "project.weight"].t());
    const at::Tensor fed = normed(in, p[block + "feed_norm.weight"]);
    h = in + at::matmul(at::silu(at::matmul(fed, p[block + "feed.gate.weight"].t())) *
                            at::matmul(fed, p[block + "feed.up.weight"].t()),
                        p[block + "feed.down.weight"].t());
    const at::Tensor scores = at::log_softmax(at::matmul(normed(h, p["norm.weight"]), head.t()), -1);
    for (std::int64_t row = 0; row < hidden.size(0); ++row)
      for (std::int64_t t = 0; t < length; ++t) {
        bool counts = text.targets[row][t + d].item<std::int64_t>() >= 0;
        for (std::int64_t i = 1; i <= d; ++i)
          counts = counts && at::equal(text.documents[row][t + i], text.documents[row][t]);
        if (counts) total = total - scores[row][t][text.targets[row][t + d].item<std::int64_t>()];
      }
  }
  return total / double(text.tokens.numel() * model->options().multi_token_depth);
}

TEST(HybridMultiToken, TheLossIsThatOfTheDefinition) {
  const Text text;
  for (const std::int64_t depth : {1, 3})
    for (const bool tie : {false, true}) {
      const HybridOptions options = predicting("AF", depth, "", tie);
      HybridStage model = built(options);
      // Blocks alone, to see what the head is given.
      HybridStage body = built(options, StagePart{.index = 0, .count = 2, .first_block = 0, .end_block = 2});
      const at::Tensor logits = model->forward_with(text.tokens, text.keywords());
      ASSERT_EQ(model->auxiliary_losses().size(), 1u);
      const AuxiliaryLoss& loss = model->auxiliary_losses()[0];
      EXPECT_EQ(loss.name, "multi_token");
      EXPECT_EQ(loss.weight, 0.4);
      const at::Tensor hidden = body->forward(text.tokens, text.documents).detach();
      EXPECT_LT(apart(loss.value, loss_by_definition(model, hidden, text)), 1e-12);
      model->eval();
      EXPECT_TRUE(at::equal(logits, model->forward(text.tokens, text.documents)));
    }
}

double total_of(HybridStage& model, const Text& text) {
  const torch::NoGradGuard no_grad;
  double total =
      token_loss(model->forward_with(text.tokens, text.keywords()), text.targets, double(text.tokens.numel()))
          .item<double>();
  for (const AuxiliaryLoss& loss : model->auxiliary_losses())
    total += loss.weight * loss.value.item<double>();
  return total;
}

TEST(HybridMultiToken, GradientsContainItsLoss) {
  const Text text;
  for (const char* block : {"A", "M", "E", "F"}) {
    SCOPED_TRACE(block);
    HybridStage model = built(predicting("FE", 2, block, block[0] == 'A'));
    token_loss(model->forward_with(text.tokens, text.keywords()), text.targets, double(text.tokens.numel()))
        .backward();
    ASSERT_EQ(model->auxiliary_losses().size(), 3u);
    constexpr double kStep = 1e-6;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor values = item.value().detach().view({-1}), gradient = item.value().grad().view({-1});
      for (std::int64_t i = 0; i < values.numel(); i += 1 + values.numel() / 2) {
        const double before = values[i].item<double>();
        values[i] = before + kStep;
        const double above = total_of(model, text);
        values[i] = before - kStep;
        const double below = total_of(model, text);
        values[i] = before;
        EXPECT_NEAR(gradient[i].item<double>(), (above - below) / (2 * kStep), 5e-6)
            << item.key() << " " << i;
      }
    }
  }
}

// Both copies of the embedding have their share of the gradient.
TEST(HybridMultiToken, StagesHaveTheGradientsOfTheWhole) {
  const Text text;
  for (const bool tie : {false, true}) {
    const HybridOptions options = predicting("AEF", 2, "A", tie);
    HybridStage model = built(options);
    const at::Tensor expected = model->forward_with(text.tokens, text.keywords());
    token_loss(expected, text.targets, 18).backward();
    Gradients whole;
    collect(*model, whole);
    // A whole model whose second use of the embedding is a leaf of its own.
    HybridStage separate = built(options);
    const at::Tensor second = separate->separate_last_use("embed.weight");
    token_loss(separate->forward_with(text.tokens, text.keywords()), text.targets, 18).backward();
    EXPECT_LT(
        apart(separate->named_parameters()["embed.weight"].grad() + second.grad(), whole["embed.weight"]),
        1e-12);
    for (const int stages : {2, 3}) {
      std::vector<HybridStage> parts;
      std::vector<at::Tensor> inputs, outputs;
      at::Tensor x = text.tokens;
      for (const StagePart& part : partition_model(options, stages)) {
        parts.push_back(built(options, part));
        inputs.push_back(x);
        outputs.push_back(parts.back()->forward_with(x, text.keywords()));
        x = outputs.back().detach();
        if (!part.has_head()) x.requires_grad_(true);
      }
      EXPECT_TRUE(at::equal(outputs.back(), expected));
      token_loss(outputs.back(), text.targets, 18).backward();
      for (std::size_t i = parts.size() - 1; i-- > 0;) outputs[i].backward(inputs[i + 1].grad());
      Gradients split;
      for (const HybridStage& part : parts) collect(*part, split);
      ASSERT_EQ(split.size(), whole.size());
      for (const auto& [name, each] : whole) EXPECT_LT(apart(split[name], each), 1e-12) << name;
      // Both shares of the embedding are bits of the whole's two leaves.
      EXPECT_TRUE(at::equal(parts.front()->named_parameters()["embed.weight"].grad(),
                            separate->named_parameters()["embed.weight"].grad()));
      EXPECT_TRUE(at::equal(parts.back()->named_parameters()["embed.weight"].grad(), second.grad()));
    }
  }
}

TEST(HybridMultiToken, OnlyTrainingPredictsFurtherTokens) {
  const Text text;
  HybridStage model = built(predicting("AM", 1));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { model->forward(text.tokens); }), "multi_token_depth"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         model->forward_with(text.tokens, Tree::dict({{"tokens", text.tokens}}));
                       }),
                       "both or neither"));
  model->eval();
  const at::Tensor logits = model->forward(text.tokens);
  EXPECT_TRUE(model->auxiliary_losses().empty());
  EXPECT_TRUE(at::equal(model->forward_with(text.tokens, text.keywords(false)), logits));
  const std::unique_ptr<StageCache> cache = model->make_cache(9);
  EXPECT_LT(apart(model->forward_cached(text.tokens, *cache), logits), 1e-12);
}

TEST(HybridMultiToken, EveryStageIsGivenTokensAndTargets) {
  const Text text;
  const auto model = trainable_hybrid(predicting("AM", 1));
  const StageInputs inputs =
      model->inputs({.tokens = text.tokens, .targets = text.targets, .documents = text.documents});
  EXPECT_TRUE(at::equal(inputs.keywords["tokens"].tensor(), text.tokens));
  EXPECT_TRUE(at::equal(inputs.keywords["targets"].tensor(), text.targets));
  EXPECT_TRUE(at::equal(inputs.keywords["documents"].tensor(), text.documents));
}

// A module whose arguments are tensors, as compile() wants it.
struct PredictingModule : torch::nn::Module {
  explicit PredictingModule(HybridStage inner) : stage(register_module("stage", std::move(inner))) {}
  at::Tensor forward(at::Tensor tokens, at::Tensor targets) {
    return stage->forward_with(tokens, Tree::dict({{"tokens", tokens}, {"targets", targets}}));
  }
  HybridStage stage;
};

TEST(HybridMultiToken, CompiledEqualsEager) {
  const Text text;
  const HybridOptions options = predicting("AE", 2, "A", true);
  auto eager = std::make_shared<PredictingModule>(built(options, at::kFloat)),
       original = std::make_shared<PredictingModule>(built(options, at::kFloat));
  const auto compiled = graph::compile(original);
  auto fast = compiled;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor expected = eager->forward(text.tokens, text.targets),
                     actual = fast->forward(text.tokens, text.targets);
    EXPECT_TRUE(at::equal(actual, expected));
    for (const at::Tensor& logits : {expected, actual}) logits.pow(2).mean().backward();
    for (const auto& item : eager->named_parameters())
      EXPECT_TRUE(at::equal(original->named_parameters()[item.key()].grad(), item.value().grad()))
          << item.key();
  }
}

TEST(HybridMultiToken, BadOptionsNameTheirKey) {
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { predicting("AE", -1).check(); }), "multi_token_depth"));
  EXPECT_NO_THROW(predicting("AE", 15).check());
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { predicting("AE", 16).check(); }),
                       "model.multi_token_depth: got 16, expected less than model.context, 16"));
  for (const char* block : {"X", "AF", "|"})
    EXPECT_TRUE(
        has_text(message_of<ConfigError>([&] { predicting("AE", 1, block).check(); }), "multi_token_block"));
  // The options of a block that only the prediction has are checked, too.
  HybridOptions options = predicting("FF", 1, "A");
  options.heads = 3;
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { options.check(); }), "model.heads"));
}

// ---- the bias that balances experts ----

TEST(HybridRouterBias, AStepMovesItTowardsEqualLoads) {
  HybridOptions options = predicting("EAE", 1, "E");
  options.router_bias_rate = 0.25;
  HybridStage model = built(options);
  const Text text;
  const std::vector<StateBuffer> buffers = model->state_buffers();
  ASSERT_EQ(buffers.size(), 3u);
  EXPECT_EQ(buffers[0].name, "blocks.0.experts.router_bias");
  EXPECT_EQ(buffers[1].name, "blocks.2.experts.router_bias");
  EXPECT_EQ(buffers[2].name, "blocks.3.experts.router_bias");
  const auto load = [&] { return model->named_buffers()["blocks.0.experts.router_load"]; };
  for (int run = 0; run < 3; ++run) model->forward_with(text.tokens, text.keywords());
  const at::Tensor loads = load().clone();
  EXPECT_EQ(loads.sum().item<double>(), 3 * 18 * 2);  // three microbatches of 18 tokens, two experts each
  // A step that was skipped does not count.
  model->after_step({.updated = false});
  EXPECT_EQ(load().abs().sum().item<double>(), 0);
  EXPECT_EQ(buffers[0].tensor.abs().sum().item<double>(), 0);
  for (int run = 0; run < 3; ++run) model->forward_with(text.tokens, text.keywords());
  EXPECT_TRUE(at::equal(load(), loads));
  model->after_step({});
  EXPECT_TRUE(at::equal(buffers[0].tensor, at::sign(loads.mean() - loads) * 0.25));
  EXPECT_EQ(load().abs().sum().item<double>(), 0);
  // Evaluation does not count tokens.
  model->eval();
  model->forward(text.tokens);
  EXPECT_EQ(load().abs().sum().item<double>(), 0);
  EXPECT_TRUE(built(predicting("EAE", 0))->state_buffers().empty());
}

}  // namespace hybrid_multi_token_test
}  // namespace penstock::models
