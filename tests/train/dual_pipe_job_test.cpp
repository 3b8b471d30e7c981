// Training with DualPipe: two copies of the model in opposite directions are one model. Losses, gradients and
// parameters are those of one process, both copies have the same bits, and checkpoints fit other layouts.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/errors.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "penstock/train/job/stage_copies.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace dual_pipe_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;
using penstock::test::ScratchFolder;
using penstock::test::small_data;

using Options = std::vector<std::string>;

Layout dual_pipe(const std::string& name) {
  return {.name = name, .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"};
}

const Options kHybrid = {"--pattern",
                         "AEME",
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
                         "--depth_layers",
                         "1,2",
                         "--router_bias_rate",
                         "0.002",
                         "--multi_token_depth",
                         "1",
                         "--multi_token_block",
                         "E",
                         "--tie_head",
                         "true",
                         "--dropout",
                         "0.1",
                         "--lr",
                         "0.01"};

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
  Options more = kHybrid;
  more.insert(more.end(), {"--shard", "2"});
  const ParityReport sharded = compare(replicas, more);
  EXPECT_TRUE(sharded.ok()) << to_text(sharded, false);
  more.back() = "1";
  more.insert(more.end(), {"--ep", "2"});
  const ParityReport experts = compare(replicas, more);
  EXPECT_TRUE(experts.ok()) << to_text(experts, false);
}

// What a job ends with: the parameters of both copies by name.
struct Ended {
  std::vector<double> losses, norms;
  double validation = 0;
  std::map<std::string, at::Tensor> tensors;
};

struct Run {
  int steps = 3;
  const ScratchFolder* from = nullptr;
  const ScratchFolder* to = nullptr;
};

Ended train(const Layout& layout, const Run& run, const Options& options = kHybrid) {
  const TrainConfig config = config_of(layout, options);
  Ended ended;
  std::mutex mutex;
  comm::run_ranks(layout.pp * layout.dp, 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    if (run.from != nullptr) {
      checkpoint::WorldAgreement agreement(world);
      job.load(checkpoint::open_latest(agreement, run.from->path())->checkpoint);
    }
    while (job.steps_done() < run.steps) {
      const StepOutcome outcome = job.train_step();
      if (world.rank() != 0) continue;
      ended.losses.push_back(outcome.loss);
      ended.norms.push_back(outcome.grad_norm);
    }
    const double validation = job.validate();
    if (run.to != nullptr) {
      checkpoint::CheckpointWriter saver(world, run.to->path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) ended.validation = validation;
    const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
      const auto [at, is_new] = ended.tensors.emplace(name, tensor.detach().clone());
      EXPECT_TRUE(is_new || at::equal(at->second, tensor)) << "copies differ in " << name;
    };
    for (const optim::NamedParameter& parameter : job.model().parameters())
      keep(parameter.name, parameter.tensor);
    for (const models::StateBuffer& buffer : job.model().state_buffers()) keep(buffer.name, buffer.tensor);
  });
  return ended;
}

// Checkpoints go from DualPipe to one process, to another pipeline and back; copies stay equal.
TEST(DualPipeJob, CheckpointsMoveBetweenLayouts) {
  const Layout one{.name = "one"},
      v{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"};
  const Ended whole = train(one, {.steps = 5});
  const ScratchFolder first, second;
  const Ended begun = train(dual_pipe("DualPipe"), {.steps = 2, .to = &first});
  const Ended moved = train(v, {.steps = 3, .from = &first, .to = &second});
  const Ended back = train(dual_pipe("DualPipe"), {.steps = 5, .from = &second});
  // Each parameter counts once in the norm.
  for (std::size_t i = 0; i < begun.norms.size(); ++i)
    EXPECT_NEAR(begun.norms[i], whole.norms[i], 2e-4 * whole.norms[i]) << "step " << i + 1;
  std::vector<double> losses = begun.losses;
  losses.insert(losses.end(), moved.losses.begin(), moved.losses.end());
  losses.insert(losses.end(), back.losses.begin(), back.losses.end());
  ASSERT_EQ(losses.size(), whole.losses.size());
  for (std::size_t i = 0; i < losses.size(); ++i)
    EXPECT_NEAR(losses[i], whole.losses[i], 2e-5 * whole.losses[i]) << "step " << i + 1;
  EXPECT_NEAR(back.validation, whole.validation, 2e-5 * whole.validation);
  EXPECT_EQ(back.tensors.size(), whole.tensors.size());
  EXPECT_EQ(train(one, {.steps = 3, .from = &first}).losses, train(v, {.steps = 3, .from = &first}).losses);
}

// The copies also agree on which experts are balanced: their loads are summed.
TEST(DualPipeJob, RouterBiasesAreThoseOfOneProcess) {
  const Ended one = train({.name = "one"}, {}), dual = train(dual_pipe("DualPipe"), {});
  std::size_t biases = 0;
  for (const auto& [name, tensor] : one.tensors) {
    if (!has_text(name, "router_bias")) continue;
    ++biases;
    EXPECT_TRUE(at::equal(dual.tensors.at(name), tensor)) << name;
    EXPECT_GT(tensor.abs().max().item<double>(), 0) << name;
  }
  EXPECT_EQ(biases, 3u);
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
