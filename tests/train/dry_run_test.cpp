// What a dry run says of a configuration.
#include "penstock/train/dry_run.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/models/options.h"
#include "penstock/train/model_stages.h"
#include "tests/has_text.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace dry_run_test {

using test::config_of;
using test::has_text;
using test::Layout;
using test::small_data;

TrainConfig with_data(const Layout& layout, const std::vector<std::string>& more = {}) {
  TrainConfig config = config_of(layout, more);
  config.data.shards = (small_data().folder / "shards").string();
  return config;
}

TEST(DryRun, OnePipeline) {
  const DryRun run = dry_run(with_data({.name = "pp2", .pp = 2}, {"--partition", "count"}));
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "mesh: 2 ranks = pp 2 x dp 1 x tp 1, on cpu"));
  EXPECT_TRUE(has_text(text, "rank 1: pp 1, dp 0, tp 0; stages 1\n"));
  EXPECT_TRUE(has_text(text, "stage 0: embed, blocks 0-1"));
  EXPECT_TRUE(has_text(text, "stage 1: blocks 2-3, norm, tied head"));
  EXPECT_TRUE(has_text(text, "schedule: 1F1B, 2 stages, 4 microbatches of 2 rows; bubble "));
  EXPECT_TRUE(has_text(text, "0F0"));
  EXPECT_TRUE(has_text(text, "predicted: "));
  EXPECT_TRUE(has_text(text, "a step of 128 tokens"));
  EXPECT_TRUE(has_text(text, "for 20 steps"));

  // 1F1B: the first rank holds two microbatches, the last one.
  ASSERT_EQ(run.memory.size(), 2u);
  EXPECT_EQ(run.memory[0].live, 2);
  EXPECT_EQ(run.memory[1].live, 1);
  EXPECT_GT(run.measured.block.kept, 2 * 16 * 16 * 4);  // more than its output
  EXPECT_GE(run.memory[0].activations, 2 * 2 * run.measured.block.kept);
  // A tied weight is on both ranks; AdamW has two tensors of a parameter's size.
  const models::TransformerOptions options = transformer_options(run.config.model);
  EXPECT_EQ(run.memory[0].parameters + run.memory[1].parameters, 4 * (models::parameter_count(options) + options.vocabulary * options.width));
  EXPECT_EQ(run.memory[0].optimizer, 2 * run.memory[0].parameters);
  EXPECT_GT(run.measured.block.forward, 0);
  EXPECT_GE(run.step_seconds, 4 * 2 * (run.measured.block.forward + run.measured.block.backward));
}

TEST(DryRun, ReplicasTensorParallelRanksAndVirtualStages) {
  const DryRun run = dry_run(with_data({.name = "all", .pp = 2, .virtual_stages = 2, .dp = 2, .tp = 2, .schedule = "ZBVZeroBubble", .accumulation = 2}, {"--tie_head", "false", "--optimizer", "sgd", "--momentum", "0"}));
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "mesh: 8 ranks = pp 2 x dp 2 x tp 2"));
  EXPECT_TRUE(has_text(text, "rank 5: pp 1, dp 0, tp 1; stages 1, 2\n"));
  EXPECT_TRUE(has_text(text, "2 runs a step"));
  EXPECT_TRUE(has_text(text, "each of 2 tensor-parallel ranks does its share"));
  EXPECT_EQ(run.memory[0].optimizer, 0);
  EXPECT_EQ(run.memory[0].gradients, 2 * run.memory[0].parameters);
  EXPECT_DOUBLE_EQ(run.step_seconds, 2 * run.simulation.time);
  EXPECT_EQ(run.tokens_per_step, 2 * 2 * 4 * 2 * 16);
}

TEST(DryRun, RefusesWhatTrainingRefuses) {
  TrainConfig small = with_data({.name = "one"});
  small.model.vocabulary = 100;
  EXPECT_THROW(dry_run(small), ConfigError);
  TrainConfig nowhere = config_of({.name = "one"});
  nowhere.data.sources = {"/nonexistent"};
  EXPECT_THROW(dry_run(nowhere), ConfigError);
  TrainConfig heads = with_data({.name = "one"});
  heads.layout.tp = heads.layout.ranks = 4;
  EXPECT_THROW(dry_run(heads), ConfigError);
}

}  // namespace dry_run_test
}  // namespace penstock::train
