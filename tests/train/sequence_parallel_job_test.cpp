// Training with hidden states that are divided along the length over tensor-parallel ranks, compared with one
// process: losses, gradients and parameters of every step (parity.h states the tolerances).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace sequence_parallel_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::expect_near_steps;
using penstock::test::Layout;
using penstock::test::Options;
using penstock::test::ScratchFolder;
using penstock::test::small_data;
using penstock::test::train_job;
using penstock::test::TrainedJob;
using penstock::test::with;

constexpr int kSteps = 2;

const Options kHybrid = {"--pattern",
                         "AEMF",
                         "--attention_feed",
                         "false",
                         "--experts",
                         "4",
                         "--expert_width",
                         "16",
                         "--state_size",
                         "4",
                         "--state_head_width",
                         "8",
                         "--state_chunk",
                         "8",
                         "--router_z_weight",
                         "0.1",
                         "--dropout",
                         "0.1",
                         "--layout.sequence_parallel",
                         "true"};

void record(const TrainConfig& config, const std::filesystem::path& folder) {
  comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
    record_side(world, config, small_data().open(config), folder, kSteps);
  });
}

void expect_one_process(const Layout& layout, const Options& options) {
  SCOPED_TRACE(layout.name);
  const ScratchFolder scratch;
  const TrainConfig config = config_of(layout, options);
  ASSERT_TRUE(config.layout.sequence_parallel);
  ASSERT_FALSE(one_process(config).layout.sequence_parallel);
  record(one_process(config), scratch / "one");
  record(config, scratch / "layout");
  const ParityReport report =
      compare_sides(scratch / "one", scratch / "layout", kSteps, parity_tolerance(config));
  EXPECT_TRUE(report.ok()) << to_text(report, true);
}

TEST(SequenceParallelJob, HybridAgreesWithOneProcess) {
  expect_one_process({.name = "tp2", .tp = 2}, kHybrid);
  Options without_dropout = kHybrid;
  *std::next(std::find(without_dropout.begin(), without_dropout.end(), "--dropout")) = "0";
  expect_one_process({.name = "pp2 tp2", .pp = 2, .tp = 2}, without_dropout);
  expect_one_process({.name = "pp2 tp2, all parts", .pp = 2, .tp = 2},
                     with(kHybrid, {"--depth_layers", "1,2", "--multi_token_depth", "1",
                                    "--multi_token_block", "E", "--tie_head", "true", "--ngram_orders", "2,3",
                                    "--ngram_buckets", "64", "--embed_norm", "rms_norm"}));
}

// Halves of a backward, and blocks that run again in it, with the same masks of dropout.
TEST(SequenceParallelJob, SplitBackwardsAndRecomputation) {
  expect_one_process({.name = "ZBV tp2", .pp = 2, .virtual_stages = 2, .tp = 2, .schedule = "ZBVZeroBubble"},
                     with(kHybrid, {"--recompute", "block"}));
}

// The loss "balance" is not linear in the tokens: replicas would differ from one process.
TEST(SequenceParallelJob, ShardsAndReplicasAgreeWithOneProcess) {
  const Options linear = with(kHybrid, {"--balance_weight", "0"});
  expect_one_process({.name = "tp2 shard2", .dp = 2, .tp = 2}, with(linear, {"--shard", "2"}));
  expect_one_process({.name = "tp2 dp2, experts divided, two runs", .dp = 2, .tp = 2, .accumulation = 2},
                     with(linear, {"--ep", "2"}));
}

TEST(SequenceParallelJob, TransformerAgreesWithOneProcess) {
  const Options options{"--dropout", "0.1", "--tie_head", "true", "--layout.sequence_parallel", "true"};
  expect_one_process({.name = "pp2 tp2", .pp = 2, .tp = 2}, options);
  expect_one_process({.name = "pp2 tp2 without dropout", .pp = 2, .tp = 2},
                     {"--layout.sequence_parallel", "true"});
  expect_one_process({.name = "tp2 shard2", .dp = 2, .tp = 2},
                     with(options, {"--shard", "2", "--recompute", "block"}));
}

// In 16 bits tensor parallelism rounds differently from one process; how tokens are divided adds nothing.
TEST(SequenceParallelJob, LowPrecisionIsThatOfTensorParallelism) {
  const auto train = [](const Options& more) {
    return train_job({.name = "pp2 tp2", .pp = 2, .tp = 2},
                     with({"--dropout", "0.1", "--precision", "bf16"}, more));
  };
  expect_near_steps(train({"--layout.sequence_parallel", "true"}), train({}), 1e-5, 1e-3);
}

// Every rank sends its own tokens and nothing else: 1/tp of every activation and gradient.
TEST(SequenceParallelJob, BytesAtBorders) {
  const auto bytes_of = [](const Layout& layout, const Options& options) {
    const TrainConfig config = config_of(layout, options);
    std::vector<std::int64_t> bytes(static_cast<std::size_t>(config.layout.ranks));
    comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      job.train_step();
      bytes[static_cast<std::size_t>(world.rank())] = job.pipeline().report().border.bytes;
    });
    return bytes;
  };
  const Options plain(kHybrid.begin(), kHybrid.end() - 2);
  // 4 microbatches of 2 rows of 16 tokens, of width 16 in float32.
  constexpr std::int64_t kWhole = 4 * 2 * 16 * 16 * 4;
  EXPECT_EQ(bytes_of({.name = "pp2", .pp = 2}, plain), std::vector<std::int64_t>(2, kWhole));
  EXPECT_EQ(bytes_of({.name = "pp2 tp2", .pp = 2, .tp = 2}, kHybrid),
            std::vector<std::int64_t>(4, kWhole / 2));
  EXPECT_EQ(bytes_of({.name = "pp2 tp2", .pp = 2, .tp = 2}, with(kHybrid, {"--border_dtype", "bf16"})),
            std::vector<std::int64_t>(4, kWhole / 4));
}

// Checkpoints do not depend on how activations are divided.
TEST(SequenceParallelJob, CheckpointsContinueInOneProcess) {
  const ScratchFolder saved;
  const Layout divided{.name = "pp2 tp2", .pp = 2, .tp = 2};
  train_job(divided, kHybrid, {.steps = 2, .to = &saved});
  const TrainedJob ours = train_job(divided, kHybrid, {.steps = 4, .from = &saved}),
                   one = train_job({.name = "one"}, Options(kHybrid.begin(), kHybrid.end() - 2),
                                   {.steps = 4, .from = &saved});
  ASSERT_EQ(ours.steps.size(), 2u);
  expect_near_steps(ours, one, 2e-5, 2e-4);  // in the norm replicated parameters count once
}

}  // namespace sequence_parallel_job_test
}  // namespace penstock::train
