// Training with hidden states that are divided along the length over tensor-parallel ranks, compared with one
// process: losses, gradients and parameters of every step (parity.h states the tolerances).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace sequence_parallel_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::Layout;
using penstock::test::ScratchFolder;
using penstock::test::small_data;

using Options = std::vector<std::string>;

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

Options with(const Options& options, const Options& more) {
  Options all = options;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

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
  expect_one_process({.name = "tp2 shard2", .dp = 2, .tp = 2},
                     with(options, {"--shard", "2", "--recompute", "block"}));
}

// In 16 bits tensor parallelism rounds differently from one process; how tokens are divided adds nothing.
TEST(SequenceParallelJob, LowPrecisionIsThatOfTensorParallelism) {
  const auto train = [](const Options& more) {
    const TrainConfig config = config_of({.name = "pp2 tp2", .pp = 2, .tp = 2},
                                         with({"--dropout", "0.1", "--precision", "bf16"}, more));
    std::vector<StepOutcome> outcomes;
    comm::run_ranks(4, 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      for (int step = 0; step < 3; ++step) {
        const StepOutcome outcome = job.train_step();
        if (world.rank() == 0) outcomes.push_back(outcome);
      }
    });
    return outcomes;
  };
  const std::vector<StepOutcome> plain = train({}), divided = train({"--layout.sequence_parallel", "true"});
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(divided[i].loss, plain[i].loss, 1e-5 * plain[i].loss);
    EXPECT_NEAR(divided[i].grad_norm, plain[i].grad_norm, 1e-3 * plain[i].grad_norm);
  }
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
  const ScratchFolder scratch;
  const auto train = [&](const Layout& layout, const Options& options, int steps, bool continues) {
    const TrainConfig config = config_of(layout, options);
    std::vector<StepOutcome> steps_seen;
    comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      if (continues) {
        checkpoint::WorldAgreement agreement(world);
        job.load(checkpoint::open_latest(agreement, scratch.path())->checkpoint);
      }
      while (job.steps_done() < steps) {
        const StepOutcome outcome = job.train_step();
        if (world.rank() == 0) steps_seen.push_back(outcome);
      }
      if (continues) return;
      checkpoint::CheckpointWriter saver(world, scratch.path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    });
    return steps_seen;
  };
  const Layout divided{.name = "pp2 tp2", .pp = 2, .tp = 2};
  train(divided, kHybrid, 2, false);
  const std::vector<StepOutcome> ours = train(divided, kHybrid, 4, true),
                                 one = train({.name = "one"}, Options(kHybrid.begin(), kHybrid.end() - 2), 4,
                                             true);
  ASSERT_EQ(ours.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(ours[i].loss, one[i].loss, 2e-5 * one[i].loss);
    // Replicated parameters count once.
    EXPECT_NEAR(ours[i].grad_norm, one[i].grad_norm, 2e-4 * one[i].grad_norm);
  }
}

}  // namespace sequence_parallel_job_test
}  // namespace penstock::train
