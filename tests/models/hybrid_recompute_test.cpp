// Hybrid models and transformers whose blocks are recomputed: losses, gradients and counters have the bits of
// models that keep everything, and less is kept.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "penstock/hybrid.h"
#include "penstock/language_model.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/transformer.h"
#include "tests/models/small_hybrid.h"

namespace penstock::models {
namespace hybrid_recompute_test {

struct Setting {
  HybridOptions options;
  RecomputePlan plan;
  bool low = false, documents = false, relations = false, cut = false;
};

std::string random_letters(std::mt19937& random, std::size_t count, const std::string& of) {
  std::string letters;
  for (std::size_t i = 0; i < count; ++i) letters += of[random() % of.size()];
  return letters;
}

Setting random_setting(std::mt19937& random) {
  const auto coin = [&] { return random() % 2 == 0; };
  Setting setting;
  const std::string pattern = random_letters(random, 2 + random() % 4, "AMEF");
  setting.options = test::small_hybrid(pattern);
  HybridOptions& options = setting.options;
  options.attention_feed = coin();
  options.dropout = coin() ? 0.3 : 0;
  options.router_bias_rate = coin() ? 0.01 : 0;
  options.shared_expert_width = coin() ? 8 : 0;
  const bool has_feed = pattern.find('F') != std::string::npos ||
                        (options.attention_feed && pattern.find('A') != std::string::npos);
  options.tree_feed = has_feed && coin();
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(pattern.size()); ++i)
    if (random() % 3 == 0) options.depth_layers.push_back(i);
  if (coin()) options.windows = {5};
  options.multi_token_depth = random() % 3 == 0 ? 1 : 0;
  setting.relations = pattern.find('A') != std::string::npos && coin();
  options.relations = setting.relations ? 3 : 0;
  setting.documents = coin();
  setting.low = random() % 3 == 0;
  setting.cut = coin();
  if (coin()) {
    setting.plan.letters = random_letters(random, 1 + random() % 2, "AMEF");
  } else {
    for (std::size_t i = 0; i < pattern.size(); ++i) setting.plan.blocks.push_back(coin());
  }
  if (random() % 3 == 0) setting.plan.microbatches = {1};
  if (setting.cut && random() % 3 == 0) setting.plan.stages = {1};
  return setting;
}

struct Outcome {
  std::vector<at::Tensor> values;
  std::map<std::string, at::Tensor> gradients, buffers;
};

class Model {
 public:
  explicit Model(const Setting& setting) : setting_(setting) {
    const auto blocks = static_cast<std::int64_t>(setting.options.pattern.size());
    const std::int64_t middle = blocks / 2;
    if (setting.cut) {
      stages_.push_back(make({.index = 0, .count = 2, .first_block = 0, .end_block = middle}));
      stages_.push_back(make({.index = 1, .count = 2, .first_block = middle, .end_block = blocks}));
    } else {
      stages_.push_back(make({.index = 0, .count = 1, .first_block = 0, .end_block = blocks}));
    }
  }

  void set_recompute(const RecomputePlan& plan) {
    for (const HybridStage& stage : stages_) stage.ptr()->set_recompute(plan);
  }

  // Two microbatches, whose backwards follow both forwards.
  Outcome run() {
    Outcome outcome;
    std::vector<at::Tensor> losses;
    for (int m = 0; m < 2; ++m) {
      const StepGuard step(context(m));
      losses.push_back(loss(m, outcome));
    }
    for (int m = 0; m < 2; ++m) {
      const StepGuard step(context(m));
      losses[static_cast<std::size_t>(m)].backward(at::full({}, 8.0, losses[0].options()));
      outcome.values.push_back(losses[static_cast<std::size_t>(m)].detach());
    }
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      for (const auto& item : stages_[i]->named_parameters()) {
        outcome.gradients[std::to_string(i) + "." + item.key()] = item.value().grad();
        item.value().mutable_grad() = at::Tensor();
      }
      for (const auto& item : stages_[i]->named_buffers()) {
        outcome.buffers[std::to_string(i) + "." + item.key()] = item.value().clone();
        if (item.key().find("router_load") != std::string::npos) item.value().zero_();
      }
    }
    return outcome;
  }

 private:
  static HybridStage make_stage(const HybridOptions& options, const StagePart& part) {
    return test::enlarged_stage(options, part, at::kFloat);
  }
  HybridStage make(const StagePart& part) const { return make_stage(setting_.options, part); }

  static StepContext context(int microbatch) {
    StepContext context;
    context.seed = 3;
    context.microbatch = microbatch;
    context.microbatches = 2;
    context.loss_scale = 8;
    return context;
  }

  at::Tensor loss(int microbatch, Outcome& outcome) {
    const at::Generator generator =
        at::detail::createCPUGenerator(static_cast<std::uint64_t>(microbatch) + 1);
    const auto ids = [&](std::int64_t below, std::vector<std::int64_t> shape) {
      return at::randint(below, shape, generator, at::TensorOptions().dtype(at::kLong));
    };
    const at::Tensor tokens = ids(19, {2, 12}), targets = ids(19, {2, 12});
    HybridMetadata metadata;
    if (setting_.documents) metadata.documents = at::arange(12).div(5, "floor").expand({2, 12}).contiguous();
    if (setting_.relations) metadata.relations = ids(2, {2, 3, 12, 12}).to(at::kBool);
    if (setting_.options.tree_feed) metadata.parents = (at::arange(12) - 1).expand({2, 12}).contiguous();
    if (setting_.options.multi_token_depth > 0) metadata.tokens = tokens, metadata.targets = targets;
    const AutocastScope autocast(at::kCPU, setting_.low ? std::optional(at::kBFloat16) : std::nullopt);
    at::Tensor x = tokens;
    for (const HybridStage& stage : stages_) {
      x = stage.ptr()->forward_with(x, metadata);
      for (const AuxiliaryLoss& each : stage->auxiliary_losses()) outcome.values.push_back(each.value);
    }
    return token_loss(x, targets, static_cast<double>(targets.numel()));
  }

  Setting setting_;
  std::vector<HybridStage> stages_;
};

void expect_same(const std::map<std::string, at::Tensor>& ours,
                 const std::map<std::string, at::Tensor>& plain) {
  ASSERT_EQ(ours.size(), plain.size());
  for (const auto& [name, tensor] : plain) {
    ASSERT_EQ(ours.at(name).defined(), tensor.defined()) << name;
    EXPECT_TRUE(!tensor.defined() || at::equal(ours.at(name), tensor)) << name;
  }
}

TEST(HybridRecompute, RandomModelsHaveTheBitsOfThoseThatKeepAll) {
  std::mt19937 random(23);
  int recomputed = 0;
  for (int round = 0; round < 30; ++round) {
    const Setting setting = random_setting(random);
    SCOPED_TRACE(std::to_string(round) + ": " + setting.options.pattern);
    Model model(setting);
    const Outcome plain = model.run();
    model.set_recompute(setting.plan);
    const Outcome again = model.run();
    recomputed += setting.plan.any() ? 1 : 0;
    ASSERT_EQ(again.values.size(), plain.values.size());
    for (std::size_t i = 0; i < plain.values.size(); ++i)
      EXPECT_TRUE(at::equal(again.values[i], plain.values[i])) << "loss " << i;
    expect_same(again.gradients, plain.gradients);
    expect_same(again.buffers, plain.buffers);
  }
  EXPECT_GT(recomputed, 20);
}

TEST(HybridRecompute, LoadsOfExpertsCountOnce) {
  Setting setting;
  setting.options = test::small_hybrid("EE");
  setting.options.router_bias_rate = 0.01;
  Model model(setting);
  model.set_recompute(RecomputePlan::all());
  for (const auto& [name, tensor] : model.run().buffers)
    EXPECT_TRUE(name.find("router_load") == std::string::npos ||
                tensor.sum().item<double>() == 2 * 2 * 12 * 2)
        << name << ": microbatches, rows, tokens, choices";
}

// Bytes that live between forward and backward.
template <class Stage>
std::int64_t kept_bytes(const Stage& stage, const at::Tensor& tokens) {
  StepContext context;
  context.microbatch = 0;
  const StepGuard step(context);
  const std::int64_t before = cpu_memory().live;
  at::Tensor logits = stage.ptr()->forward_with(tokens, Tree());
  const std::int64_t kept = cpu_memory().live - before;
  logits.sum().backward();
  for (const at::Tensor& parameter : stage->parameters()) parameter.mutable_grad() = at::Tensor();
  return kept;
}

TEST(HybridRecompute, LessIsKept) {
  count_cpu_memory();
  HybridOptions options = test::small_hybrid("AEME");
  options.width = 32;
  options.expert_width = 64;
  options.context = 64;
  const at::Tensor tokens = at::arange(64).remainder(19).expand({2, 64}).contiguous();
  HybridStage stage(options);
  stage->set_initial_values(1);
  const ModelPlan plan = options.plan();
  std::map<std::string, std::int64_t> kept;
  for (const char* text : {"none", "block", "attention", "experts", "letters:M", "pattern:.R.."}) {
    stage->set_recompute(parse_recompute(text, plan));
    kept_bytes(stage, tokens);
    kept[text] = kept_bytes(stage, tokens);
  }
  for (const char* text : {"block", "attention", "experts", "letters:M", "pattern:.R.."})
    EXPECT_LT(kept[text], kept["none"]) << text;
  EXPECT_LT(kept["experts"], kept["none"] * 6 / 10);
  EXPECT_LT(kept["block"], kept["experts"]);
  // What the two blocks save adds up.
  EXPECT_NEAR(static_cast<double>(kept["none"] - kept["experts"]),
              2 * static_cast<double>(kept["none"] - kept["pattern:.R.."]),
              0.05 * static_cast<double>(kept["none"]));
  // Inputs of four blocks and of the last norm, what the norm and the head keep, and the logits.
  const std::int64_t hidden = 2 * 64 * 32 * 4, logits = 2 * 64 * 19 * 4;
  EXPECT_LT(kept["block"], 7 * hidden + logits + 64 * 1024);
}

TEST(TransformerRecompute, BitsAndBytes) {
  count_cpu_memory();
  const TransformerOptions options{.vocabulary = 19,
                                   .width = 32,
                                   .layers = 4,
                                   .heads = 4,
                                   .feed_width = 64,
                                   .context = 64,
                                   .dropout = 0.2};
  TransformerStage stage(options);
  stage->set_initial_values(1);
  const at::Tensor tokens = at::arange(64).remainder(19).expand({2, 64}).contiguous();
  const auto run = [&] {
    StepContext context;
    context.microbatch = 0;
    const StepGuard step(context);
    std::vector<at::Tensor> all{stage->forward_with(tokens, Tree())};
    all[0].pow(2).sum().backward();
    all[0] = all[0].detach();
    for (const at::Tensor& parameter : stage->parameters()) {
      all.push_back(parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
    return all;
  };
  const std::vector<at::Tensor> plain = run();
  const std::int64_t kept = kept_bytes(stage, tokens);
  for (const char* text : {"block", "attention", "pattern:R..R"}) {
    stage->set_recompute(parse_recompute(text, options.plan()));
    const std::vector<at::Tensor> again = run();
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(again[i], plain[i])) << text << i;
    EXPECT_LT(kept_bytes(stage, tokens), kept * (text[0] == 'p' ? 3 : 2) / 4) << text;
  }
}

}  // namespace hybrid_recompute_test
}  // namespace penstock::models
