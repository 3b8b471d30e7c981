// Experts divided over data-parallel ranks (layout.ep): training equals that with whole experts, in every
// layout, and continues under another number of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/train/job/job.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace expert_parallel_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;
using penstock::test::ScratchFolder;
using penstock::test::small_data;

// Sums over the rows of several ranks are in another order: float32 rounding.
constexpr double kLoss = 2e-5, kNorm = 2e-4, kParameter = 2e-4;
constexpr double kGradient = 1e-4;  // of the largest element; AdamW would hide a wrong factor

// A and E blocks with every part that an E can have, and auxiliary losses that matter.
const std::vector<std::string> kExperts = {
    "--pattern",         "AEFE", "--attention_feed",      "false", "--experts",        "4",
    "--expert_width",    "12",   "--shared_expert_width", "8",     "--balance_weight", "5",
    "--router_z_weight", "0.1"};

struct Experiment {
  Layout layout;
  int ep = 1, shard = 1;
  std::vector<std::string> more = {};
  std::string pattern = "AEFE";
};

struct Outcome {
  std::vector<double> losses, norms;
  double validation = 0;
  std::map<std::string, at::Tensor> gradients;   // whole, of the first step, before clipping
  std::map<std::string, at::Tensor> parameters;  // whole, after the last step
  std::int64_t expert_elements = 0;              // of one parameter of experts, on rank 0
};

TrainConfig config_of(const Experiment& experiment) {
  std::vector<std::string> more = kExperts;
  more[1] = experiment.pattern;
  more.insert(more.end(), {"--clip_norm", "0.5", "--ep", std::to_string(experiment.ep), "--shard",
                           std::to_string(experiment.shard)});
  more.insert(more.end(), experiment.more.begin(), experiment.more.end());
  return config_of(experiment.layout, more);
}

// Starts from the last checkpoint in `from`, if any; saves to `to`, if given, after the steps.
Outcome train(const Experiment& experiment, int steps, const ScratchFolder* from = nullptr,
              const ScratchFolder* to = nullptr) {
  const TrainConfig config = config_of(experiment);
  Outcome run;
  std::mutex mutex;
  comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    if (from != nullptr) {
      checkpoint::WorldAgreement agreement(world);
      job.load(checkpoint::open_latest(agreement, from->path())->checkpoint);
    }
    job.set_gradient_hook([&](const std::vector<optim::NamedParameter>& parameters) {
      const at::NoGradGuard no_grad;
      for (const optim::NamedParameter& parameter : parameters) {
        const at::Tensor gradient = parameter.tensor.grad(),
                         whole = is_dtensor(gradient) ? full_tensor(gradient) : gradient.clone();
        const std::lock_guard lock(mutex);
        run.gradients.emplace(parameter.name, whole);
      }
    });
    for (int step = 0; step < steps; ++step) {
      const StepOutcome outcome = job.train_step();
      job.set_gradient_hook({});
      if (world.rank() != 0) continue;
      run.losses.push_back(outcome.loss);
      run.norms.push_back(outcome.grad_norm);
    }
    if (to != nullptr) {
      checkpoint::CheckpointWriter saver(world, to->path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    }
    const double validation = job.validate();
    if (world.rank() == 0) run.validation = validation;
    const at::NoGradGuard no_grad;
    for (const optim::NamedParameter& parameter : job.model().parameters()) {
      ensure_sharded(parameter.tensor);
      const bool distributed = is_dtensor(parameter.tensor);
      const at::Tensor whole =
          distributed ? full_tensor(parameter.tensor) : parameter.tensor.detach().clone();
      const std::lock_guard lock(mutex);
      if (world.rank() == 0 && parameter.name == "blocks.1.experts.gate")
        run.expert_elements = distributed ? to_local(parameter.tensor).numel() : whole.numel();
      const auto [place, is_first] = run.parameters.try_emplace(parameter.name, whole);
      if (is_first) continue;  // else copies must be equal
      EXPECT_TRUE(torch::equal(place->second, whole)) << parameter.name << " on rank " << world.rank();
    }
  });
  return run;
}

// Every element of every parameter, once.
double norm_of(const std::map<std::string, at::Tensor>& gradients) {
  double sum = 0;
  for (const auto& [name, gradient] : gradients)
    sum += gradient.to(at::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

void expect_near(const Outcome& ours, const Outcome& theirs) {
  EXPECT_NEAR(ours.norms.front(), norm_of(ours.gradients), 1e-7 * ours.norms.front());
  ASSERT_EQ(ours.losses.size(), theirs.losses.size());
  for (std::size_t i = 0; i < theirs.losses.size(); ++i) {
    EXPECT_NEAR(ours.losses[i], theirs.losses[i], kLoss * theirs.losses[i]) << "step " << i;
    EXPECT_NEAR(ours.norms[i], theirs.norms[i], kNorm * theirs.norms[i]) << "step " << i;
  }
  EXPECT_NEAR(ours.validation, theirs.validation, kLoss * theirs.validation);
  ASSERT_EQ(ours.gradients.size(), theirs.gradients.size());
  for (const auto& [name, value] : theirs.gradients)
    EXPECT_LT((ours.gradients.at(name) - value).abs().max().item<double>(),
              kGradient * value.abs().max().item<double>())
        << name;
  ASSERT_EQ(ours.parameters.size(), theirs.parameters.size());
  for (const auto& [name, value] : theirs.parameters)
    EXPECT_LT((ours.parameters.at(name) - value).abs().max().item<double>(), kParameter) << name;
}

// All of them train on microbatches of four rows.
Layout replicas(const std::string& name, int dp) {
  return {.name = name, .dp = dp, .microbatch_size = 4 / dp, .microbatches = 2};
}

constexpr int kSteps = 2;

const Outcome& one_process() {
  static const Outcome one = train({replicas("one", 1)}, kSteps);
  return one;
}

TEST(ExpertParallelJob, EqualsWholeExpertsAndOneProcess) {
  std::map<std::pair<int, int>, double> first_loss;
  for (const auto& [dp, ep] : {std::pair{2, 1}, {2, 2}, {4, 2}, {4, 4}}) {
    SCOPED_TRACE("dp " + std::to_string(dp) + ", ep " + std::to_string(ep));
    const Outcome divided = train({replicas("", dp), ep}, kSteps);
    expect_near(divided, one_process());
    EXPECT_EQ(divided.expert_elements, one_process().expert_elements / ep);
    first_loss[{dp, ep}] = divided.losses.front();
  }
  // The first forward computes the same products from the same values, whoever has the experts.
  EXPECT_EQ((first_loss[{2, 1}]), (first_loss[{2, 2}]));
  EXPECT_EQ((first_loss[{4, 2}]), (first_loss[{4, 4}]));
}

// Whatever is around the blocks: routed experts, a bias of the router, experts at the last stage that predict
// further tokens, n-grams.
TEST(ExpertParallelJob, WithEveryOtherPart) {
  const std::vector<std::string> more{"--depth_layers",      "1,2", "--router_bias_rate",  "0.002",
                                      "--multi_token_depth", "1",   "--multi_token_block", "E",
                                      "--ngram_orders",      "2,3", "--ngram_buckets",     "32"};
  const Outcome whole = train({replicas("dp2", 2), 1, 1, more}, kSteps);
  expect_near(train({replicas("dp2 ep2", 2), 2, 1, more}, kSteps), whole);
  expect_near(train({replicas("dp2 shard2 ep2", 2), 2, 2, more}, kSteps), whole);
  const Layout pipeline{.name = "pp2 dp2 ep2", .pp = 2, .dp = 2, .microbatches = 2};
  expect_near(train({pipeline, 2, 1, more}, kSteps), whole);
}

// Only the last stage has experts.
TEST(ExpertParallelJob, ExpertsOfMultiTokenPredictionAlone) {
  const auto with_ep = [&](const Layout& layout, int ep, int shard) {
    return train({.layout = layout,
                  .ep = ep,
                  .shard = shard,
                  .more = {"--multi_token_depth", "1", "--multi_token_block", "E"},
                  .pattern = "AFFA"},
                 kSteps);
  };
  const Outcome whole = with_ep(replicas("dp2", 2), 1, 1);
  EXPECT_TRUE(whole.parameters.contains("blocks.4.experts.gate"));
  expect_near(with_ep(replicas("dp2 ep2", 2), 2, 1), whole);
  expect_near(with_ep(replicas("dp2 shard2 ep2", 2), 2, 2), whole);
  const Layout pipeline{.name = "pp2 dp2 ep2", .pp = 2, .dp = 2, .microbatches = 2};
  expect_near(with_ep(pipeline, 2, 1), whole);
}

TEST(ExpertParallelJob, PipelinesHaveTheirOwnGroups) {
  expect_near(train({Layout{.name = "pp2 dp2", .pp = 2, .dp = 2, .microbatches = 2}, 2}, kSteps),
              one_process());
  const Layout split{
      .name = "ZBV", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble", .microbatches = 2};
  expect_near(train({split, 2}, kSteps), one_process());
}

TEST(ExpertParallelJob, ShardedParameters) {
  const auto expect = [&](const Experiment& experiment, std::int64_t parts) {
    SCOPED_TRACE(experiment.layout.name);
    const Outcome sharded = train(experiment, kSteps);
    expect_near(sharded, one_process());
    EXPECT_EQ(sharded.expert_elements, one_process().expert_elements / parts);
  };
  expect({replicas("dp4, shard 4, ep 2: experts are sharded over two pairs", 4), 2, 4}, 4);
  expect({replicas("dp4, shard 2, ep 2: two replicas", 4), 2, 2}, 2);
  expect(
      {Layout{
           .name = "pp2 dp2, shard 2, ep 2: experts are divided only", .pp = 2, .dp = 2, .microbatches = 2},
       2, 2},
      2);
}

TEST(ExpertParallelJob, TensorParallelRanksSplitTheColumns) {
  const Layout columns{.name = "dp2 tp2", .dp = 2, .tp = 2, .microbatches = 2};
  const Outcome whole = train({columns, 2}, kSteps), sharded = train({columns, 2, 2}, kSteps);
  expect_near(whole, one_process());
  expect_near(sharded, one_process());
  EXPECT_EQ(whole.expert_elements, one_process().expert_elements / 4);
}

TEST(ExpertParallelJob, AccumulatedRuns) {
  const Layout runs{.name = "two runs", .dp = 2, .accumulation = 2, .microbatches = 1};
  Outcome plain = train({runs, 2}, kSteps), sharded = train({runs, 2, 2}, kSteps);
  plain.validation = sharded.validation = one_process().validation;  // of other batches
  expect_near(plain, one_process());
  expect_near(sharded, one_process());
}

TEST(ExpertParallelJob, ContinuesUnderAnotherNumberOfRanks) {
  Outcome rest = one_process();
  rest.losses.erase(rest.losses.begin(), rest.losses.begin() + 1);
  rest.norms.erase(rest.norms.begin(), rest.norms.begin() + 1);
  const ScratchFolder divided, sharded;
  train({replicas("ep4", 4), 4}, 1, nullptr, &divided);
  train({replicas("ep2 shard2", 2), 2, 2}, 1, nullptr, &sharded);
  rest.gradients = train({replicas("one", 1)}, 1, &divided).gradients;
  expect_near(train({replicas("one", 1)}, kSteps - 1, &divided), rest);
  expect_near(train({replicas("ep4", 4), 4}, kSteps - 1, &sharded), rest);
}

// Counting the choices of each replica alone is another loss, with and without divided experts.
TEST(ExpertParallelJob, BalanceOfEachReplicaAlone) {
  const std::vector<std::string> alone{"--balance_scope", "replica"};
  const Outcome apart = train({replicas("dp2", 2), 1, 1, alone}, kSteps);
  const std::string router = "blocks.1.experts.router.weight";
  EXPECT_GT((apart.parameters.at(router) - one_process().parameters.at(router)).abs().max().item<double>(),
            2 * kParameter);
  expect_near(train({replicas("dp2 ep2", 2), 2, 1, alone}, kSteps), apart);
}

TEST(ExpertParallelJob, WhatDoesNotFitSaysWhy) {
  const auto error = [](int dp, int ep, int shard, const char* pattern, const char* experts) {
    return message_of<ConfigError>([&] {
      config_of(Layout{.name = "", .dp = dp}, {"--ep", std::to_string(ep), "--shard", std::to_string(shard),
                                               "--pattern", pattern, "--experts", experts});
    });
  };
  EXPECT_TRUE(has_text(error(2, 4, 1, "AEFE", "4"), "layout.dp = 2"));
  EXPECT_TRUE(has_text(error(4, 4, 2, "AEFE", "4"), "layout.shard = 2"));
  EXPECT_TRUE(has_text(error(2, 2, 1, "AEFE", "5"), "set model.experts to 6"));
  EXPECT_TRUE(has_text(error(2, 2, 1, "AAAF", "4"), "no E blocks"));
}

}  // namespace expert_parallel_job_test
}  // namespace penstock::train
