// Training with DualPipe: two copies of the model in opposite directions are one model. Losses, gradients and
// parameters are those of one process, both copies have the same bits, and checkpoints fit other layouts.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/job/parity.h"
#include "penstock/train/job/stage_copies.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace dual_pipe_job_test {

using namespace std::chrono_literals;
using namespace penstock::test;

Layout dual_pipe(const std::string& name) {
  return {.name = name, .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"};
}

const Options kHybrid = with(with(hybrid_blocks(), hybrid_losses()),
                             {"--router_bias_rate", "0.002", "--tie_head", "true", "--dropout", "0.1"});

constexpr int kSteps = 2;

ParityReport compare(const Layout& layout, const Options& more = {}) {
  const ScratchFolder scratch;
  const TrainConfig config = config_of(layout, more);
  const auto record = [&](const TrainConfig& each, const std::string& side) {
    comm::run_ranks(static_cast<int>(each.layout.ranks), 120s, [&](comm::World& world) {
      record_side(world, each, small_data().open(each), scratch / side, kSteps);
    });
  };
  record(one_process(config), "one");
  record(config, "layout");
  EXPECT_FALSE(expects_same_bits(config));
  return compare_sides(scratch / "one", scratch / "layout", kSteps, parity_tolerance(config));
}

TEST(DualPipeJob, HasTheGradientsAndParametersOfOneProcess) {
  Layout two_runs = dual_pipe("two runs"), replicas = dual_pipe("dp2"), tensors = dual_pipe("tp2"),
         four = dual_pipe("pp4");
  two_runs.accumulation = 2;
  replicas.dp = 2;
  tensors.tp = 2;
  four.pp = 4;
  four.microbatches = 8;
  for (const Layout& layout : {dual_pipe("pp2"), two_runs, replicas, tensors, four}) {
    SCOPED_TRACE(layout.name);
    const ParityReport report = compare(layout);
    EXPECT_TRUE(report.ok()) << to_text(report, false);
    // Both copies are compared: 4 blocks of 9, 1 norm, and the embedding, which several stages share.
    std::size_t second = 0;
    for (const ParityRow& row : report.rows) second += row.tensor.find("(second copy)") != std::string::npos;
    EXPECT_EQ(second, 2u * kSteps * 37 * static_cast<std::size_t>(layout.dp));
  }
}

TEST(DualPipeJob, TrainsHybridModelsWithEveryLoss) {
  Layout replicas = dual_pipe("dp2");
  replicas.dp = 2;
  EXPECT_TRUE(compare(dual_pipe("pp2"), kHybrid).ok());
  const ParityReport sharded = compare(replicas, with(kHybrid, {"--shard", "2"}));
  EXPECT_TRUE(sharded.ok()) << to_text(sharded, false);
  const ParityReport experts = compare(replicas, with(kHybrid, {"--ep", "2"}));
  EXPECT_TRUE(experts.ok()) << to_text(experts, false);
}

TrainedJob train(const Layout& layout, JobRun run = {}) {
  run.validates = run.keeps.parameters = true;
  return train_job(layout, kHybrid, run);
}

// Checkpoints go from DualPipe to one process, to another pipeline and back; copies stay equal.
TEST(DualPipeJob, CheckpointsMoveBetweenLayouts) {
  const Layout one{.name = "one"},
      v{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"};
  const TrainedJob whole = train(one, {.steps = 5});
  const ScratchFolder first, second;
  TrainedJob all = train(dual_pipe("DualPipe"), {.steps = 2, .to = &first});
  const TrainedJob moved = train(v, {.steps = 3, .from = &first, .to = &second});
  const TrainedJob back = train(dual_pipe("DualPipe"), {.steps = 5, .from = &second});
  for (const TrainedJob* job : {&moved, &back})
    all.steps.insert(all.steps.end(), job->steps.begin(), job->steps.end());
  // Each parameter counts once in the norm.
  expect_near_steps(all, whole);
  EXPECT_NEAR(back.validation, whole.validation, 2e-5 * whole.validation);
  EXPECT_EQ(back.parameters.size(), whole.parameters.size());
  EXPECT_EQ(back.buffers.size(), whole.buffers.size());
  EXPECT_EQ(train(one, {.steps = 3, .from = &first}).losses(),
            train(v, {.steps = 3, .from = &first}).losses());
}

// The copies also agree on which experts are balanced: their loads are summed.
TEST(DualPipeJob, RouterBiasesAreThoseOfOneProcess) {
  const TrainedJob one = train({.name = "one"});
  EXPECT_EQ(one.buffers.size(), 3u);
  for (const auto& [name, tensor] : one.buffers) {
    EXPECT_TRUE(has_text(name, "router_bias"));
    EXPECT_GT(tensor.abs().max().item<double>(), 0) << name;
  }
  expect_equal_tensors(train(dual_pipe("DualPipe")).buffers, one.buffers);
}

TEST(StageCopies, PartsAndStages) {
  const schedule::StageMap map = schedule::StageMap::make(schedule::StagePlacement::Bidirectional, 4, 8, 8);
  EXPECT_EQ(parts_of_model(map), 4);
  EXPECT_EQ(part_of_stage(map, 2), 2);
  EXPECT_EQ(part_of_stage(map, 6), 2);
  EXPECT_EQ(stages_of_part(map, 2), (std::vector<int>{2, 6}));
  EXPECT_FALSE(is_second_copy(map, 3));
  EXPECT_TRUE(is_second_copy(map, 4));
  const schedule::StageMap v = schedule::StageMap::make(schedule::StagePlacement::V, 4, 8, 8);
  EXPECT_EQ(parts_of_model(v), 8);
  EXPECT_EQ(stages_of_part(v, 6), (std::vector<int>{6}));
  EXPECT_FALSE(is_second_copy(v, 7));
  EXPECT_EQ(copies_of_model(config_of(dual_pipe("DualPipe")).layout), 2);
  EXPECT_EQ(copies_of_model(config_of({.name = "one"}).layout), 1);
}

TEST(StageCopies, WhatCannotBeTrainedSaysWhy) {
  using schedule::Chain;
  const auto refusal = [](const schedule::StageMap& map) {
    return message_of<ConfigError>([&] { check_copies(map, "some.csv"); });
  };
  const auto chain = [](int first, int stages, int microbatch) {
    return Chain{.first_stage = first, .stages = stages, .first_microbatch = microbatch, .microbatches = 1};
  };
  EXPECT_TRUE(has_text(refusal({2, {0, 1, 1, 0, 0, 1}, {chain(0, 2, 0), chain(2, 2, 1), chain(4, 2, 2)}}),
                       "3 copies of the model"));
  EXPECT_TRUE(has_text(refusal({2, {0, 1, 1}, {chain(0, 2, 0), chain(2, 1, 1)}}), "2 and 1 stages"));
  EXPECT_TRUE(has_text(refusal({2, {0, 1, 0, 1}, {chain(0, 2, 0), chain(2, 2, 1)}}),
                       "both copies of part 0 on rank 0"));
  EXPECT_NO_THROW(check_copies({2, {0, 1, 1, 0}, {chain(0, 2, 0), chain(2, 2, 1)}}, "some.csv"));
}

}  // namespace dual_pipe_job_test
}  // namespace penstock::train
