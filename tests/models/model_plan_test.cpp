// Options, patterns and the partition of a model: no tensors.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/hybrid_options.h"
#include "penstock/models/plan/pattern.h"
#include "penstock/partition.h"
#include "penstock/transformer_options.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::models {
namespace model_plan_test {

using test::has_text;
using test::message_of;

TEST(TransformerOptions, ZerosAreFilledIn) {
  const TransformerOptions whole = TransformerOptions{.width = 96, .heads = 4}.resolved();
  EXPECT_EQ(whole.key_value_heads, 4);
  EXPECT_EQ(whole.feed_width, 256);  // 8 / 3 * 96
  EXPECT_EQ(whole.resolved(), whole);
}

TEST(TransformerOptions, EachMistakeNamesItsField) {
  const auto message = [](TransformerOptions options) {
    return message_of<ConfigError>([&] { options.check(); });
  };
  EXPECT_TRUE(has_text(message({.vocabulary = 0}), "model.vocabulary"));
  EXPECT_TRUE(has_text(message({.width = 130, .heads = 4}), "a multiple of heads, 4"));
  EXPECT_TRUE(has_text(message({.width = 12, .heads = 4}), "use a multiple of 8"));
  EXPECT_TRUE(has_text(message({.layers = -1}), "model.layers"));
  EXPECT_TRUE(has_text(message({.heads = 0}), "model.heads"));
  EXPECT_TRUE(has_text(message({.heads = 4, .key_value_heads = 3}), "a divisor of heads, 4"));
  EXPECT_TRUE(has_text(message({.key_value_heads = -2}), "model.key_value_heads"));
  EXPECT_TRUE(has_text(message({.feed_width = -1}), "model.feed_width"));
  EXPECT_TRUE(has_text(message({.context = 0}), "model.context"));
  EXPECT_TRUE(has_text(message({.rope_theta = 1}), "model.rope_theta"));
  EXPECT_TRUE(has_text(message({.norm_epsilon = 0}), "model.norm_epsilon"));
  EXPECT_TRUE(has_text(message({.dropout = 1}), "model.dropout"));
}

TEST(TransformerOptions, CountsOfAModelDoneByHand) {
  const TransformerOptions options{.vocabulary = 10,
                                   .width = 8,
                                   .layers = 2,
                                   .heads = 2,
                                   .key_value_heads = 1,
                                   .feed_width = 12,
                                   .context = 16};
  const std::int64_t block = 8 + 8 * 8 + 2 * 4 * 8 + 8 * 8 + 8 + 3 * 8 * 12;
  EXPECT_EQ(block_parameter_count(options), block);
  EXPECT_EQ(parameter_count(options), 2 * block + 8 + 2 * 80);
  std::int64_t listed = 0;
  for (const ParameterShape& parameter : parameter_shapes(options))
    listed += parameter.shape.size() == 1 ? parameter.shape[0] : parameter.shape[0] * parameter.shape[1];
  EXPECT_EQ(listed, parameter_count(options));
  TransformerOptions tied = options;
  tied.tie_head = true;
  EXPECT_EQ(parameter_count(tied), parameter_count(options) - 80);
  EXPECT_EQ(block_flops_per_token(options, 16), 2 * (block - 16) + 4 * 16 * 8);
  EXPECT_EQ(training_flops_per_token(options, 16), 3 * (2 * (2.0 * (block - 16) + 512) + 160));
}

TransformerOptions layers(std::int64_t count, std::int64_t vocabulary = 256) {
  return {.vocabulary = vocabulary, .width = 64, .layers = count, .heads = 4, .context = 64};
}

TEST(ModelPlan, TotalsAreSumsOverTheParts) {
  ModelPlan plan{.vocabulary = 10, .width = 4, .context = 8};
  plan.embed = {{"embed.weight", {10, 4}}};
  plan.blocks = {
      {.letter = 'A', .kind = "attention", .parameters = {{"blocks.0.a", {4, 4}}}, .flops_per_token = 32},
      {.letter = 'E',
       .kind = "experts",
       .parameters = {{"blocks.1.gate", {4, 4, 3}}},
       .inactive_parameters = 24,
       .flops_per_token = 48}};
  plan.head = {{"norm.weight", {4}}};
  plan.tied = {"embed.weight"};
  plan.head_flops_per_token = 80;
  EXPECT_EQ(parameter_count(plan), 40 + 16 + 48 + 4);
  EXPECT_EQ(active_parameter_count(plan), parameter_count(plan) - 24);
  EXPECT_EQ(training_flops_per_token(plan), 3 * (32 + 48 + 80));
  const std::vector<StagePart> parts = partition_model(plan, 2, {.pattern = "A|E"});
  const std::vector<PartReport> reports = report_parts(parts, plan);
  EXPECT_EQ(reports[0].parameters, 40 + 16);
  EXPECT_EQ(reports[1].parameters, 48 + 4 + 40);  // with the copy of the tied weight
  EXPECT_EQ(reports[1].block_kinds, (std::map<std::string, std::int64_t>{{"experts", 1}}));
  EXPECT_EQ(stages_of_parameter(parts, plan, "embed.weight"), (std::vector<int>{0, 1}));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { partition_model(plan, 2, {.pattern = "E|A"}); }),
                       "block 0: got E, expected A"));
}

TEST(Pattern, RoundTrip) {
  for (const std::string text : {"A", "AAAA", "AA|AA|A", "A|A", "AE|MF"})
    EXPECT_EQ(to_text(parse_pattern(text)), text);
  EXPECT_EQ(parse_pattern("AA|AA|A").boundaries, (std::vector<int>{2, 4}));
  EXPECT_EQ(parse_pattern(" AA | A "), parse_pattern("AA|A"));
  EXPECT_FALSE(parse_pattern("AAA").has_cuts());
}

TEST(Pattern, BadInput) {
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern(""); }), "no blocks"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern("|AA"); }), "character 1"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern("AA||A"); }), "character 4"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern("AA|"); }), "after '|'"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern("AAx"); }), "'x'"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern("aa"); }), "'a'"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { parse_pattern("A\n"); }), "\\x0a"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { partition_model(layers(3), 2, {.pattern = "AM|A"}); }),
                       "block 1: got M, expected A"));
}

TEST(StageParts, CompleteAndInOrder) {
  for (const Balance balance : {Balance::Count, Balance::Cost})
    for (std::int64_t count = 1; count < 12; ++count)
      for (int stages = 1; stages <= count; ++stages) {
        const auto parts = partition_model(layers(count), stages, {.balance = balance});
        ASSERT_EQ(parts.size(), static_cast<std::size_t>(stages));
        std::int64_t at = 0;
        for (const StagePart& part : parts) {
          EXPECT_EQ(part.first_block, at);
          EXPECT_EQ(part.count, stages);
          EXPECT_EQ(part.has_embed(), part.index == 0);
          EXPECT_EQ(part.has_head(), part.index == stages - 1);
          at = part.end_block;
        }
        EXPECT_EQ(at, count);
      }
}

TEST(StageParts, ALargeHeadTakesBlocksFromTheLastStage) {
  const auto small = partition_model(layers(8, 16), 4, {.balance = Balance::Cost});
  EXPECT_EQ(small.back().blocks(), 2);
  const auto large = partition_model(layers(8, 4000), 4, {.balance = Balance::Cost});
  EXPECT_EQ(large.back().blocks(), 0);
  EXPECT_EQ(large.front().blocks(), 2);  // the embedding has a cost, too
  // Measured costs override estimated ones.
  const auto measured = partition_model(
      layers(4), 2,
      {.balance = Balance::Cost, .costs = PartCosts{.blocks = {5, 1, 1, 1}, .embed = 0, .head = 0}});
  EXPECT_EQ(measured[0].blocks(), 1);
  EXPECT_THROW(partition_model(
                   layers(4), 2,
                   {.balance = Balance::Cost, .costs = PartCosts{.blocks = {1, 1}, .embed = 0, .head = 0}}),
               ValueError);
}

TEST(StageParts, PatternsOverrideTheBalance) {
  const auto parts = partition_model(layers(5), 3, {.balance = Balance::Cost, .pattern = "A|A|AAA"});
  EXPECT_EQ(parts[2], (StagePart{2, 3, 2, 5}));
  EXPECT_EQ(partition_model(layers(5), 3, {.pattern = "AAAAA"}), partition_model(layers(5), 3));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { partition_model(layers(5), 2, {.pattern = "A|A|AAA"}); }),
                       "2, as in the layout"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { partition_model(layers(4), 3, {.pattern = "A|A|AAA"}); }),
                       "model.layers"));
  EXPECT_THROW(partition_model(layers(2), 3), ValueError);
}

TEST(StageParts, CutsOverrideTheBalance) {
  const auto parts = partition_model(layers(5), 3, {.balance = Balance::Cost, .cuts = {1, 2}});
  EXPECT_EQ(parts, partition_model(layers(5), 3, {.pattern = "A|A|AAA"}));
  EXPECT_EQ(partition_model(layers(5), 3, {.pattern = "AAAAA", .cuts = {1, 2}}), parts);
  const auto message = [](int stages, const PartitionOptions& how) {
    return message_of<ConfigError>([&] { partition_model(layers(5), stages, how); });
  };
  EXPECT_TRUE(has_text(message(2, {.cuts = {1, 2}}), "cuts 1, 2: got 3 stages, expected 2"));
  EXPECT_TRUE(has_text(message(3, {.cuts = {2, 2}}), "increasing numbers from 1 to 4"));
  EXPECT_TRUE(has_text(message(3, {.cuts = {0, 2}}), "got 0"));
  EXPECT_TRUE(has_text(message(3, {.cuts = {2, 5}}), "got 5"));
  EXPECT_TRUE(has_text(message(3, {.pattern = "A|A|AAA", .cuts = {1, 2}}), "leave out one of the two"));
}

// Experts have most of the parameters, but a token passes through few of them.
TEST(StageParts, ByWeightCountsParametersOfBlocks) {
  HybridOptions options{.pattern = "AAEAAAEA", .vocabulary = 64, .width = 32, .context = 32};
  options.experts = 16;
  const ModelPlan plan = options.plan();
  const std::vector<double> weights = block_weights(plan);
  ASSERT_EQ(weights.size(), 8u);
  EXPECT_GT(weights[2], 8 * weights[0]);
  const auto parts = partition_model(plan, 3, {.balance = Balance::Weight});
  const auto ranges = plan::partition_by_weight(weights, 3);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].first_block, ranges[i].begin);
    EXPECT_EQ(parts[i].end_block, ranges[i].end);
  }
  EXPECT_EQ(parts[0].end_block, 3);  // up to the first E
  EXPECT_EQ(partition_model(layers(7), 3, {.balance = Balance::Weight}), partition_model(layers(7), 3));
}

TEST(StageParts, StagesOfAParameter) {
  TransformerOptions options = layers(4);
  const auto parts = partition_model(options, 2);
  EXPECT_EQ(stages_of_parameter(parts, options, "embed.weight"), (std::vector<int>{0}));
  EXPECT_EQ(stages_of_parameter(parts, options, "blocks.2.feed.up.weight"), (std::vector<int>{1}));
  EXPECT_EQ(stages_of_parameter(parts, options, "norm.weight"), (std::vector<int>{1}));
  EXPECT_EQ(stages_of_parameter(parts, options, "head.weight"), (std::vector<int>{1}));
  options.tie_head = true;
  EXPECT_EQ(stages_of_parameter(parts, options, "embed.weight"), (std::vector<int>{0, 1}));
  EXPECT_THROW(stages_of_parameter(parts, options, "head.weight"), ValueError);
  EXPECT_THROW(stages_of_parameter(parts, options, "blocks.9.feed.up.weight"), ValueError);
  EXPECT_TRUE(has_text(describe_parts(parts, options), "stage 0: embed, blocks 0-1"));
}

// By hand: width 16, 2 heads of 8, 1 of keys and values, feed-forward 32, vocabulary 100.
TEST(StageParts, ReportsWhatEveryStageHolds) {
  TransformerOptions options{.vocabulary = 100,
                             .width = 16,
                             .layers = 5,
                             .heads = 2,
                             .key_value_heads = 1,
                             .feed_width = 32,
                             .context = 8};
  constexpr std::int64_t kAttention = 16 * 16 + 2 * (8 * 16) + 16 * 16, kFeed = 3 * 16 * 32, kNorms = 2 * 16,
                         kBlock = kAttention + kFeed + kNorms;
  constexpr std::int64_t kEmbed = 100 * 16, kLastNorm = 16;
  const auto gib = [](std::int64_t parameters) { return static_cast<double>(parameters) * 2 / 1073741824.0; };
  using Kinds = std::map<std::string, std::int64_t>;
  const std::vector<PartReport> by_pattern = report_parts(options, 3, {.pattern = "AA|AA|A"});
  const std::vector<PartReport> expected{{.stage = 0,
                                          .first_block = 0,
                                          .last_block = 1,
                                          .blocks = 2,
                                          .block_parameters = 2 * kBlock,
                                          .parameters = kEmbed + 2 * kBlock,
                                          .gib = gib(kEmbed + 2 * kBlock),
                                          .block_kinds = Kinds{{"attention", 2}}},
                                         {.stage = 1,
                                          .first_block = 2,
                                          .last_block = 3,
                                          .blocks = 2,
                                          .block_parameters = 2 * kBlock,
                                          .parameters = 2 * kBlock,
                                          .gib = gib(2 * kBlock),
                                          .block_kinds = Kinds{{"attention", 2}}},
                                         {.stage = 2,
                                          .first_block = 4,
                                          .last_block = 4,
                                          .blocks = 1,
                                          .block_parameters = kBlock,
                                          .parameters = kBlock + kLastNorm + kEmbed,
                                          .gib = gib(kBlock + kLastNorm + kEmbed),
                                          .block_kinds = Kinds{{"attention", 1}}}};
  ASSERT_EQ(by_pattern.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(by_pattern[i], expected[i]) << "stage " << i;
  std::int64_t all = 0;
  for (const PartReport& report : by_pattern) all += report.parameters;
  EXPECT_EQ(all, parameter_count(options));
  // Both copies of a tied weight are held.
  options.tie_head = true;
  EXPECT_EQ(report_parts(options, 3, {.pattern = "AA|AA|A"})[2], expected[2]);
  EXPECT_EQ(report_parts({whole_model(options)}, options)[0].parameters, parameter_count(options));
  options.tie_head = false;
  // By cost by default; a stage may then have no blocks.
  options.vocabulary = 100000;
  const std::vector<PartReport> by_cost = report_parts(options, 3);
  const std::vector<StagePart> parts = partition_model(options, 3, {.balance = Balance::Cost});
  ASSERT_NE(parts, partition_model(options, 3));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(by_cost[i].first_block, parts[i].first_block);
    EXPECT_EQ(by_cost[i].blocks, parts[i].blocks());
    EXPECT_EQ(by_cost[i].last_block, parts[i].end_block - 1);
    EXPECT_EQ(by_cost[i].block_parameters, parts[i].blocks() * kBlock);
    EXPECT_EQ(by_cost[i].block_kinds,
              parts[i].blocks() > 0 ? (Kinds{{"attention", parts[i].blocks()}}) : Kinds());
  }
  EXPECT_EQ(by_cost[2].blocks, 0);
  EXPECT_EQ(by_cost[2].parameters, kLastNorm + 100000 * 16);
  // A model of realistic size: 6.74 billion parameters are 12.5 GiB.
  const TransformerOptions large{
      .vocabulary = 32000, .width = 4096, .layers = 32, .heads = 32, .feed_width = 11008, .context = 2048};
  const PartReport whole = report_parts({whole_model(large)}, large.resolved())[0];
  EXPECT_EQ(whole.parameters, 6738415616);
  EXPECT_NEAR(whole.gib, 12.551, 0.001);
  EXPECT_TRUE(has_text(describe_parts({whole_model(large)}, large),
                       "stage 0: embed, blocks 0-31, norm, head, 6738.416 M parameters, 12.6 GiB at 2 bytes "
                       "each, 32 attention"));
}

}  // namespace model_plan_test
}  // namespace penstock::models
