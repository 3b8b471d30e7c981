// Training with sharded parameters matches training in one process, in every layout; checkpoints are
// interchangeable.
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/train/job/job.h"
#include "penstock/world.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace sharded_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::Layout;
using penstock::test::ScratchFolder;
using penstock::test::small_data;

struct Numbers {
  std::vector<double> losses, norms;
  double validation = 0;
};

// Starts from the last checkpoint in `from`, if any; saves to `to`, if given, after the steps.
Numbers run(const Layout& layout, int shard, int steps, std::vector<std::string> more,
            const ScratchFolder* from = nullptr, const ScratchFolder* to = nullptr) {
  more.insert(more.end(), {"--shard", std::to_string(shard)});
  const TrainConfig config = config_of(layout, more);
  Numbers seen;
  std::mutex mutex;
  comm::run_ranks(layout.pp * layout.dp * layout.tp, 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    if (from != nullptr) {
      checkpoint::WorldAgreement agreement(world);
      job.load(checkpoint::open_latest(agreement, from->path())->checkpoint);
    }
    for (int step = 0; step < steps; ++step) {
      const StepOutcome outcome = job.train_step();
      for (const optim::NamedParameter& parameter : job.model().parameters()) {
        const auto info = shard_of(parameter.tensor);
        ASSERT_EQ(info.has_value(), shard > 1) << parameter.name;
        if (!info) continue;
        EXPECT_EQ(info->state(), ShardGroupState::Sharded) << parameter.name;
      }
      const std::lock_guard lock(mutex);
      if (world.rank() != 0) continue;
      seen.losses.push_back(outcome.loss);
      seen.norms.push_back(outcome.grad_norm);
    }
    if (to != nullptr) {
      checkpoint::CheckpointWriter saver(world, to->path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    }
    const double loss = job.validate();
    if (world.rank() == 0) seen.validation = loss;
  });
  return seen;
}

void expect_near(const Numbers& ours, const Numbers& theirs) {
  ASSERT_EQ(ours.losses.size(), theirs.losses.size());
  for (std::size_t i = 0; i < theirs.losses.size(); ++i) {
    EXPECT_NEAR(ours.losses[i], theirs.losses[i], 2e-5 * theirs.losses[i]);
    EXPECT_NEAR(ours.norms[i], theirs.norms[i], 2e-4 * theirs.norms[i]);
  }
  EXPECT_NEAR(ours.validation, theirs.validation, 2e-5 * theirs.validation);
}

struct ShardedLayout {
  Layout layout;
  int shard;
};

class TiedOrNotSharded : public ::testing::TestWithParam<bool> {};

TEST_P(TiedOrNotSharded, AgreesWithOneProcess) {
  const std::vector<std::string> more{"--tie_head", GetParam() ? "true" : "false"};
  const Numbers one = run({.name = "one", .microbatch_size = 4}, 1, 4, more);
  for (const ShardedLayout& each :
       {ShardedLayout{{.name = "dp2, both share", .dp = 2}, 2},
        ShardedLayout{{.name = "dp4 in two pairs", .dp = 4, .microbatch_size = 1}, 2},
        ShardedLayout{{.name = "dp4, all share", .dp = 4, .microbatch_size = 1}, 4},
        ShardedLayout{{.name = "pp2 dp2", .pp = 2, .dp = 2}, 2},
        ShardedLayout{
            {.name = "interleaved dp2", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "Interleaved1F1B"},
            2}}) {
    SCOPED_TRACE(each.layout.name);
    expect_near(run(each.layout, each.shard, 4, more), one);
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, TiedOrNotSharded, ::testing::Bool(), [](const auto& info) {
  return info.param ? std::string("Tied") : std::string("Untied");
});

TEST(ShardedJob, SplitBackwards) {
  const std::vector<std::string> untied{"--tie_head", "false"};
  const Numbers one = run({.name = "one", .microbatch_size = 4}, 1, 3, untied);
  expect_near(
      run({.name = "ZBV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"}, 2, 3, untied),
      one);
}

// The first and the last stage are on one rank, and the head is the embedding.
TEST(ShardedJob, TiedHeadOfVSchedules) {
  const std::vector<std::string> tied{"--tie_head", "true"};
  const Numbers one = run({.name = "one", .microbatch_size = 4}, 1, 4, tied);
  expect_near(
      run({.name = "ZBV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"}, 2, 4, tied),
      one);
  expect_near(
      run({.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "DualPipeV"}, 2, 4, tied),
      one);
  expect_near(run({.name = "ZBV, dp4 in pairs",
                   .pp = 2,
                   .virtual_stages = 2,
                   .dp = 4,
                   .schedule = "ZBVZeroBubble",
                   .microbatch_size = 1},
                  2, 4, tied),
              one);
  // Through a checkpoint of one process, and back.
  const Numbers rest{
      {one.losses.begin() + 2, one.losses.end()}, {one.norms.begin() + 2, one.norms.end()}, one.validation};
  const ScratchFolder from_one, from_v;
  run({.name = "one", .microbatch_size = 4}, 1, 2, tied, nullptr, &from_one);
  expect_near(run({.name = "ZBV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"}, 2, 2,
                  tied, &from_one),
              rest);
  run({.name = "ZBV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"}, 2, 2, tied,
      nullptr, &from_v);
  expect_near(run({.name = "one", .microbatch_size = 4}, 1, 2, tied, &from_v), rest);
}

// Norms over pipeline, shard and tensor axes, with limits small enough that every step is clipped.
TEST(ShardedJob, ClippedOverAllAxes) {
  const std::vector<std::string> clipped{"--clip_norm", "0.05"};
  const Numbers one = run({.name = "one", .microbatch_size = 4}, 1, 4, clipped);
  for (const double norm : one.norms) EXPECT_GT(norm, 0.05);
  expect_near(run({.name = "pp2 dp2 tp2", .pp = 2, .dp = 2, .tp = 2}, 2, 4, clipped), one);
  expect_near(run({.name = "dp4 in pairs, tp2", .dp = 4, .tp = 2, .microbatch_size = 1}, 2, 4, clipped), one);
  expect_near(run({.name = "interleaved dp2 tp2",
                   .pp = 2,
                   .virtual_stages = 2,
                   .dp = 2,
                   .tp = 2,
                   .schedule = "Interleaved1F1B"},
                  2, 4, clipped),
              one);
  // Without clipping the result differs: the limit matters.
  const Numbers free = run({.name = "one", .microbatch_size = 4}, 1, 4, {"--clip_norm", "0"});
  EXPECT_NE(free.losses.back(), one.losses.back());
}

TEST(ShardedJob, TensorParallelRanks) {
  const Numbers one = run({.name = "one", .microbatch_size = 4}, 1, 3, {});
  expect_near(run({.name = "dp2 tp2", .dp = 2, .tp = 2}, 2, 3, {}), one);
  expect_near(run({.name = "pp2 dp2 tp2", .pp = 2, .dp = 2, .tp = 2}, 2, 3, {}), one);
}

// Gradients are reduced in every run of the schedule and accumulate. Validation uses other batches then.
TEST(ShardedJob, AccumulatedRuns) {
  const Numbers one = run({.name = "one", .microbatch_size = 4}, 1, 3, {});
  Numbers two = run({.name = "two runs", .pp = 2, .dp = 2, .accumulation = 2, .microbatches = 2}, 2, 3, {});
  two.validation = one.validation;
  expect_near(two, one);
}

TEST(ShardedJob, CheckpointsGoBothWays) {
  const Numbers whole = run({.name = "one", .microbatch_size = 4}, 1, 4, {});
  const Numbers rest{{whole.losses.begin() + 2, whole.losses.end()},
                     {whole.norms.begin() + 2, whole.norms.end()},
                     whole.validation};
  const ScratchFolder from_shards, from_one;
  run({.name = "pp2 dp2", .pp = 2, .dp = 2}, 2, 2, {}, nullptr, &from_shards);
  run({.name = "one", .microbatch_size = 4}, 1, 2, {}, nullptr, &from_one);
  expect_near(run({.name = "one", .microbatch_size = 4}, 1, 2, {}, &from_shards), rest);
  expect_near(run({.name = "dp4", .dp = 4, .microbatch_size = 1}, 4, 2, {}, &from_shards), rest);
  expect_near(run({.name = "dp4 in pairs", .dp = 4, .microbatch_size = 1}, 2, 2, {}, &from_one), rest);
}

TEST(ShardedJob, LowPrecision) {
  const Numbers full = run({.name = "pp2", .pp = 2, .dp = 2}, 2, 3, {}),
                half = run({.name = "pp2", .pp = 2, .dp = 2}, 2, 3, {"--precision", "bf16"});
  for (std::size_t i = 0; i < full.losses.size(); ++i) {
    EXPECT_NE(half.losses[i], full.losses[i]);
    EXPECT_NEAR(half.losses[i], full.losses[i], 0.02 * full.losses[i]);
  }
}

TEST(ShardedJob, WhatDoesNotFitSaysWhy) {
  EXPECT_THROW(config_of({.name = "dp2", .dp = 2}, {"--shard", "3"}), ConfigError);
}

}  // namespace sharded_job_test
}  // namespace penstock::train
