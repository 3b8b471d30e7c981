// Training in every layout compared with one process: losses, gradient norms, and continuing in another
// layout.
#include "penstock/train/job/job.h"
#include "penstock/train/config/configured_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/errors.h"
#include "penstock/hybrid_metadata.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/trainer.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;
using penstock::test::ScratchFolder;
using penstock::test::small_data;

struct Seen {
  std::vector<double> losses, norms;
  double validation = 0;
};

Seen train(const Layout& layout, int steps, const std::vector<std::string>& more = {}) {
  const TrainConfig config = config_of(layout, more);
  Seen seen;
  std::mutex mutex;
  comm::run_ranks(layout.pp * layout.dp * layout.tp, 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    for (int step = 0; step < steps; ++step) {
      const StepOutcome outcome = job.train_step();
      EXPECT_EQ(outcome.step, step + 1);
      EXPECT_FALSE(outcome.stop);
      if (world.rank() != 0) continue;
      const std::lock_guard lock(mutex);
      seen.losses.push_back(outcome.loss);
      seen.norms.push_back(outcome.grad_norm);
    }
    const double loss = job.validate();
    if (world.rank() == 0) seen.validation = loss;
  });
  return seen;
}

class TiedOrNot : public ::testing::TestWithParam<bool> {
 protected:
  std::vector<std::string> more() const { return {"--tie_head", GetParam() ? "true" : "false"}; }
};

TEST_P(TiedOrNot, PipelinesGiveTheSameBits) {
  const Seen one = train({.name = "one"}, 4, more());
  EXPECT_LT(one.losses.back(), one.losses.front());
  for (const Layout& layout :
       {Layout{.name = "pp2", .pp = 2}, Layout{.name = "pp4 GPipe", .pp = 4, .schedule = "GPipe"},
        Layout{.name = "interleaved", .pp = 2, .virtual_stages = 2, .schedule = "Interleaved1F1B"},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
        Layout{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"},
        Layout{.name = "looped on one rank", .pp = 1, .virtual_stages = 2, .schedule = "Interleaved1F1B"}}) {
    SCOPED_TRACE(layout.name);
    const Seen seen = train(layout, 4, more());
    EXPECT_EQ(seen.losses, one.losses);
    for (std::size_t i = 0; i < one.norms.size(); ++i)
      EXPECT_NEAR(seen.norms[i], one.norms[i], 1e-9 * one.norms[i]);
    EXPECT_EQ(seen.validation, one.validation);
  }
}

// Attention, experts and state space, with auxiliary losses that arise on every stage.
const std::vector<std::string> kHybrid = {
    "--pattern",      "AEME", "--attention_feed", "false", "--experts",          "4",
    "--expert_width", "16",   "--state_size",     "4",     "--state_head_width", "8",
    "--state_chunk",  "8",    "--balance_weight", "0.5",   "--router_z_weight",  "0.1"};

TEST(HybridJob, PipelinesGiveTheSameBits) {
  const Seen one = train({.name = "one"}, 4, kHybrid);
  EXPECT_LT(one.losses.back(), one.losses.front());
  for (const Layout& layout :
       {Layout{.name = "pp2", .pp = 2}, Layout{.name = "pp4 GPipe", .pp = 4, .schedule = "GPipe"},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
        Layout{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"}}) {
    SCOPED_TRACE(layout.name);
    const Seen seen = train(layout, 4, kHybrid);
    EXPECT_EQ(seen.losses, one.losses);
    for (std::size_t i = 0; i < one.norms.size(); ++i)
      EXPECT_NEAR(seen.norms[i], one.norms[i], 1e-9 * one.norms[i]);
    EXPECT_EQ(seen.validation, one.validation);
  }
}

// Auxiliary losses are means over the tokens of a microbatch, so that accumulated runs must weight them less.
TEST(HybridJob, AccumulatedRunsAreMoreMicrobatches) {
  const Seen one = train({.name = "one", .microbatches = 8}, 3, kHybrid);
  const Seen two = train({.name = "two runs", .pp = 2, .accumulation = 2, .microbatches = 4}, 3, kHybrid);
  for (std::size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(two.losses[i], one.losses[i], 2e-5 * one.losses[i]);
    EXPECT_NEAR(two.norms[i], one.norms[i], 2e-4 * one.norms[i]);
  }
}

// Without documents in the data they begin at a token, which only the first stage sees.
TEST(HybridJob, DocumentsFromATokenReachEveryStage) {
  std::vector<std::string> more = kHybrid;
  more.insert(more.end(), {"--bos_token", "32", "--document_mask", "false"});
  const Seen one = train({.name = "one"}, 3, more), two = train({.name = "pp4", .pp = 4}, 3, more);
  EXPECT_EQ(two.losses, one.losses);
  more[more.size() - 3] = "0";
  EXPECT_NE(train({.name = "no documents"}, 3, more).losses, one.losses);
}

// N-grams need nothing but tokens, of which only the first stage knows. A tied head besides.
TEST(HybridJob, NgramsGiveTheSameBitsInPipelines) {
  std::vector<std::string> more = kHybrid;
  more.insert(more.end(), {"--ngram_orders", "2,3", "--ngram_buckets", "64", "--embed_norm", "rms_norm"});
  const Seen one = train({.name = "one"}, 4, more);
  EXPECT_NE(one.losses, train({.name = "without"}, 4, kHybrid).losses);
  for (const Layout& layout :
       {Layout{.name = "pp2", .pp = 2},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}}) {
    SCOPED_TRACE(layout.name);
    const Seen seen = train(layout, 4, more);
    EXPECT_EQ(seen.losses, one.losses);
    for (std::size_t i = 0; i < one.norms.size(); ++i)
      EXPECT_NEAR(seen.norms[i], one.norms[i], 1e-9 * one.norms[i]);
    EXPECT_EQ(seen.validation, one.validation);
  }
}

// Parts of the model for metadata that the data does not have.
const std::vector<std::string> kMetadata = {"--pattern",     "AFEM", "--attention_feed",      "false",
                                            "--experts",     "4",    "--expert_width",        "16",
                                            "--state_size",  "4",    "--state_head_width",    "8",
                                            "--state_chunk", "8",    "--structure_embedding", "true",
                                            "--platforms",   "3",    "--tree_feed",           "true"};

// Metadata that a program computes from the tokens of a batch.
class WithMetadata : public models::TrainableModel {
 public:
  explicit WithMetadata(const TrainConfig& config)
      : model_(models::trainable_hybrid(hybrid_options(config.model))) {}
  const models::ModelPlan& plan() const override { return model_->plan(); }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    return model_->make_stage(part);
  }
  models::StageInputs inputs(const models::TokenBatch& batch) const override {
    models::HybridMetadata metadata;
    metadata.structure_kinds = batch.tokens.remainder(16);
    metadata.syntax_depths = batch.tokens.remainder(7);
    metadata.node_types = batch.tokens.remainder(256);
    metadata.platforms = batch.tokens.select(1, 0).remainder(3);
    metadata.parents =
        at::arange(-1, batch.tokens.size(1) - 1, batch.tokens.options()).expand_as(batch.tokens);
    metadata.row_valid_tokens = batch.tokens.select(1, 1).remainder(5).add(10);
    models::TokenBatch whole = batch;
    whole.metadata = metadata.keywords();
    return model_->inputs(whole);
  }

 private:
  std::shared_ptr<models::TrainableModel> model_;
};

TEST(HybridJob, MetadataOfTheBatchReachesEveryStage) {
  register_model("with metadata",
                 [](const TrainConfig& config) { return std::make_shared<WithMetadata>(config); });
  std::vector<std::string> more = kMetadata;
  const Seen without = train({.name = "without"}, 3, more);
  EXPECT_EQ(train({.name = "without, pp2", .pp = 2}, 3, more).losses, without.losses);
  more.insert(more.end(), {"--model.type", "with metadata"});
  const Seen one = train({.name = "one"}, 3, more);
  EXPECT_NE(one.losses, without.losses);
  for (const Layout& layout :
       {Layout{.name = "pp4", .pp = 4},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}}) {
    SCOPED_TRACE(layout.name);
    const Seen seen = train(layout, 3, more);
    EXPECT_EQ(seen.losses, one.losses);
    EXPECT_EQ(seen.validation, one.validation);
  }
}

// Tables of n-grams with their optimizer state, and parameters that never had a gradient.
TEST(HybridJob, ContinuesUnderAnotherLayout) {
  std::vector<std::string> more = kMetadata;
  more.insert(more.end(), {"--ngram_orders", "2,3", "--ngram_buckets", "64", "--embed_norm", "dynamic_tanh"});
  const Seen whole = train({.name = "whole"}, 4, more);
  const ScratchFolder scratch;
  const auto run = [&](const Layout& layout, bool from_start) {
    const TrainConfig config = config_of(layout, more);
    std::vector<double> losses;
    comm::run_ranks(layout.pp, 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      if (!from_start) {
        checkpoint::WorldAgreement agreement(world);
        job.load(checkpoint::open_latest(agreement, scratch.path())->checkpoint);
      }
      for (int step = 0; step < 2; ++step) {
        const StepOutcome outcome = job.train_step();
        if (world.rank() == 0) losses.push_back(outcome.loss);
      }
      if (!from_start) return;
      checkpoint::CheckpointWriter saver(world, scratch.path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    });
    return losses;
  };
  std::vector<double> losses = run({.name = "pp2", .pp = 2}, true);
  for (const double loss : run({.name = "pp4", .pp = 4}, false)) losses.push_back(loss);
  EXPECT_EQ(losses, whole.losses);
}

// Parameters that get no gradient, with parameters split over ranks.
TEST(HybridJob, PartsWithoutMetadataDoNotDisturbSharding) {
  const Seen one = train({.name = "one", .microbatch_size = 4}, 3, kMetadata);
  std::vector<std::string> more = kMetadata;
  more.insert(more.end(), {"--shard", "2"});
  const Seen two = train({.name = "shard 2", .dp = 2}, 3, more);
  for (std::size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(two.losses[i], one.losses[i], 2e-5 * one.losses[i]);
    EXPECT_NEAR(two.norms[i], one.norms[i], 2e-2 * one.norms[i]);  // auxiliary losses of each rank's tokens
  }
}

// Sums in another order: differences are float32 rounding only.
TEST(HybridJob, ReplicasAndTensorParallelRanksAgreeWithOneProcess) {
  const Seen one = train({.name = "one", .microbatch_size = 4}, 4, kHybrid);
  for (const Layout& layout :
       {Layout{.name = "dp2", .dp = 2}, Layout{.name = "tp2", .tp = 2, .microbatch_size = 4},
        Layout{.name = "pp2 tp2 ZBV",
        .pp = 2,
        .virtual_stages = 2,
        .tp = 2,
        .schedule = "ZBVZeroBubble",
        .microbatch_size = 4},
        Layout{.name = "dp2 tp2", .dp = 2, .tp = 2}}) {
    SCOPED_TRACE(layout.name);
    const Seen seen = train(layout, 4, kHybrid);
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(seen.losses[i], one.losses[i], 2e-5 * one.losses[i]);
      EXPECT_NEAR(seen.norms[i], one.norms[i], 2e-4 * one.norms[i]);
    }
    EXPECT_NEAR(seen.validation, one.validation, 2e-5 * one.validation);
  }
}

TEST(HybridJob, TensorParallelRanksThatDoNotDivideAreRefused) {
  const auto error = [&](const std::string& key, const std::string& value) {
    std::vector<std::string> more = kHybrid;
    *(std::find(more.begin(), more.end(), key) + 1) = value;
    return message_of<ConfigError>([&] { train({.name = "tp2", .tp = 2}, 1, more); });
  };
  EXPECT_TRUE(has_text(error("--expert_width", "15"), "model.expert_width = 15"));
  EXPECT_TRUE(has_text(error("--state_head_width", "32"), "heads of M blocks"));
}

// Sums in another order: differences are float32 rounding only.
TEST_P(TiedOrNot, ReplicasAndTensorParallelRanksAgreeWithOneProcess) {
  const Seen one = train({.name = "one", .microbatch_size = 4}, 4, more());
  for (const Layout& layout :
       {Layout{.name = "dp2", .dp = 2}, Layout{.name = "tp2", .tp = 2, .microbatch_size = 4},
        Layout{.name = "pp2 dp2", .pp = 2, .dp = 2},
        Layout{.name = "pp2 tp2 ZBV",
        .pp = 2,
        .virtual_stages = 2,
        .tp = 2,
        .schedule = "ZBVZeroBubble",
        .microbatch_size = 4},
        Layout{.name = "pp2 dp2 tp2", .pp = 2, .dp = 2, .tp = 2}}) {
    SCOPED_TRACE(layout.name);
    const Seen seen = train(layout, 4, more());
    ASSERT_EQ(seen.losses.size(), one.losses.size());
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(seen.losses[i], one.losses[i], 2e-5 * one.losses[i]);
      EXPECT_NEAR(seen.norms[i], one.norms[i], 2e-4 * one.norms[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, TiedOrNot, ::testing::Bool(), [](const auto& info) {
  return info.param ? std::string("Tied") : std::string("Untied");
});

TEST(Job, AccumulatedRunsAreMoreMicrobatches) {
  const Seen one = train({.name = "one", .microbatches = 8}, 3);
  const Seen two = train({.name = "two runs", .pp = 2, .accumulation = 2, .microbatches = 4}, 3);
  for (std::size_t i = 0; i < one.losses.size(); ++i)
    EXPECT_NEAR(two.losses[i], one.losses[i], 2e-6 * one.losses[i]);
  const Seen replicas = train({.name = "two runs of two replicas",
                               .dp = 2,
                               .microbatch_size = 1,
                               .accumulation = 2,
                               .microbatches = 4},
                              3);
  for (std::size_t i = 0; i < one.losses.size(); ++i)
    EXPECT_NEAR(replicas.losses[i], one.losses[i], 2e-5 * one.losses[i]);
}

TEST(Job, DropoutIsTheSameInEveryLayout) {
  const std::vector<std::string> more{"--dropout", "0.2"};
  const Seen one = train({.name = "one", .microbatch_size = 4}, 3, more);
  EXPECT_NE(one.losses, train({.name = "one", .microbatch_size = 4}, 3).losses);
  EXPECT_EQ(train({.name = "pp2", .pp = 2, .microbatch_size = 4}, 3, more).losses, one.losses);
  const Seen two = train({.name = "dp2", .dp = 2}, 3, more);
  for (std::size_t i = 0; i < one.losses.size(); ++i)
    EXPECT_NEAR(two.losses[i], one.losses[i], 2e-5 * one.losses[i]);
}

// Saved in one layout, continued in another: the same losses as in an uninterrupted run.
TEST(Job, ContinuesUnderAnotherLayout) {
  const Layout writer{.name = "pp2 dp2", .pp = 2, .dp = 2};
  const Seen whole = train(writer, 5);
  const ScratchFolder scratch;
  {
    const TrainConfig config = config_of(writer);
    comm::run_ranks(4, 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      for (int step = 0; step < 3; ++step) job.train_step();
      checkpoint::CheckpointWriter saver(world, scratch.path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    });
  }
  const auto resume = [&](const Layout& layout) {
    const TrainConfig config = config_of(layout);
    std::vector<double> losses;
    comm::run_ranks(layout.pp * layout.dp * layout.tp, 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      checkpoint::WorldAgreement agreement(world);
      job.load(checkpoint::open_latest(agreement, scratch.path())->checkpoint);
      EXPECT_EQ(job.steps_done(), 3);
      while (job.steps_done() < 5) {
        const StepOutcome outcome = job.train_step();
        if (world.rank() == 0) losses.push_back(outcome.loss);
      }
    });
    return losses;
  };
  EXPECT_EQ(resume(writer), (std::vector<double>(whole.losses.begin() + 3, whole.losses.end())));
  const std::vector<double> one = resume({.name = "one", .microbatch_size = 4});
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], whole.losses[3 + i], 2e-5 * one[i]);
  EXPECT_EQ(resume({.name = "pp4", .pp = 4, .microbatch_size = 4}), one);
  for (const Layout& layout : {Layout{.name = "dp4", .dp = 4, .microbatch_size = 1},
                               Layout{.name = "tp2", .tp = 2, .microbatch_size = 4}}) {
    SCOPED_TRACE(layout.name);
    const std::vector<double> losses = resume(layout);
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(losses[i], one[i], 2e-5 * one[i]);
  }
}

// One parameter has a gradient in every second update, another in all: AdamW's bias correction uses the steps
// of the parameter, not of the run.
TEST(Job, ASkippedParameterKeepsItsOwnCount) {
  const auto leave_out = [](TrainingJob& job) {
    job.set_gradient_hook([&job](const std::vector<optim::NamedParameter>& parameters) {
      for (const optim::NamedParameter& parameter : parameters)
        if (parameter.name == "blocks.2.feed.down.weight" ||
            (parameter.name == "blocks.1.feed.up.weight" && job.steps_done() % 2 == 1))
          parameter.tensor.mutable_grad() = at::Tensor();
    });
  };
  const auto run = [&](const Layout& layout, const ScratchFolder* from, const ScratchFolder* to,
                       std::int64_t steps) {
    const TrainConfig config = config_of(layout, {"--lr", "0.01"});
    std::vector<double> losses;
    comm::run_ranks(layout.pp * layout.dp, 120s, [&](comm::World& world) {
      TrainingJob job(world, config, small_data().open(config));
      leave_out(job);
      if (from != nullptr) {
        checkpoint::WorldAgreement agreement(world);
        job.load(checkpoint::open_latest(agreement, from->path())->checkpoint);
      }
      while (job.steps_done() < steps) {
        const StepOutcome outcome = job.train_step();
        if (world.rank() == 0) losses.push_back(outcome.loss);
      }
      if (to == nullptr) return;
      checkpoint::CheckpointWriter saver(world, to->path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    });
    return losses;
  };
  const Layout writer{.name = "pp2 dp2", .pp = 2, .dp = 2}, one{.name = "one", .microbatch_size = 4};
  const std::vector<double> whole = run(writer, nullptr, nullptr, 7);
  const ScratchFolder scratch, again;
  run(writer, nullptr, &scratch, 3);
  EXPECT_EQ(run(writer, &scratch, nullptr, 7), (std::vector<double>(whole.begin() + 3, whole.end())));
  // Saved again by a job that has loaded it, and read in another layout.
  run(writer, &scratch, &again, 4);
  const std::vector<double> others = run(one, &again, nullptr, 7);
  ASSERT_EQ(others.size(), 3U);
  for (std::size_t i = 0; i < others.size(); ++i) EXPECT_NEAR(others[i], whole[4 + i], 2e-5 * others[i]);
}

// A checkpoint from before the first update: no parameter has state yet.
TEST(Job, AJobCanBeSavedBeforeItsFirstStep) {
  const TrainConfig config = config_of({.name = "one"});
  const ScratchFolder scratch;
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    checkpoint::CheckpointWriter saver(world, scratch.path());
    saver.save(job.steps_done(), job.contents());
    saver.wait();
    const double loss = job.train_step().loss;
    TrainingJob later(world, config, small_data().open(config));
    checkpoint::WorldAgreement agreement(world);
    later.load(checkpoint::open_latest(agreement, scratch.path())->checkpoint);
    EXPECT_EQ(later.train_step().loss, loss);
  });
}

// One replica has frozen a parameter: every rank reports its name before anything is exchanged.
TEST(Job, FreezingAParameterOnOneReplicaIsRefusedByName) {
  const TrainConfig config = config_of({.name = "dp2", .dp = 2});
  const auto train = [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    job.train_step();
    if (world.rank() == 1)
      for (const optim::NamedParameter& parameter : job.model().parameters())
        if (parameter.name == "blocks.0.feed.up.weight")
          at::Tensor(parameter.tensor).set_requires_grad(false);
    job.train_step();
  };
  const std::string message =
      penstock::test::message_of<StageBackwardError>([&] { comm::run_ranks(2, 60s, train); });
  EXPECT_TRUE(penstock::test::has_text(message, "requires_grad of blocks.0.feed.up.weight")) << message;
}

TEST(Job, AnyRankCanRequestTheEnd) {
  const TrainConfig config = config_of({.name = "pp2", .pp = 2});
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    EXPECT_FALSE(job.train_step().stop);
    EXPECT_TRUE(job.train_step(world.rank() == 1).stop);
  });
}

TEST(Job, LowPrecision) {
  const Seen full = train({.name = "pp2", .pp = 2}, 3);
  const Seen half = train({.name = "pp2", .pp = 2}, 3, {"--precision", "bf16"});
  for (std::size_t i = 0; i < full.losses.size(); ++i) {
    EXPECT_NE(half.losses[i], full.losses[i]);
    EXPECT_NEAR(half.losses[i], full.losses[i], 0.02 * full.losses[i]);
  }
}

// Five blocks cannot be divided evenly. No rank builds more than its own stages; together they are the model.
TEST(ModelStages, EachRankBuildsItsOwnStagesOfTheSchedule) {
  for (const Layout& layout :
       {Layout{.name = "interleaved", .pp = 2, .virtual_stages = 2, .schedule = "Interleaved1F1B"},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
        Layout{.name = "three on each rank", .pp = 1, .virtual_stages = 3, .schedule = "LoopedBFS"},
        Layout{.name = "pp4", .pp = 4}}) {
    SCOPED_TRACE(layout.name);
    TrainConfig config = config_of(layout, {"--tie_head", "false", "--partition", "count"});
    config.model.layers = 5;
    const schedule::Schedule schedule = configured_schedule(config.layout);
    const int count = layout.pp * layout.virtual_stages;
    std::mutex mutex;
    std::vector<std::string> built;
    std::vector<models::StagePart> parts(static_cast<std::size_t>(count));
    models::ModelPlan plan;
    comm::run_ranks(layout.pp, 60s, [&](comm::World& world) {
      const ModelStages mine(RankLayout(world, config.layout), config, schedule, at::kCPU);
      const std::vector<int> expected = schedule.stages().stages_of(world.rank());
      const std::vector<PipelineStage> stages = mine.stages();
      ASSERT_EQ(stages.size(), expected.size());
      const std::lock_guard lock(mutex);
      plan = mine.plan();
      for (std::size_t i = 0; i < stages.size(); ++i) {
        const int index = stages[i].index();
        EXPECT_EQ(index, expected[i]);
        EXPECT_EQ(stages[i].count(), count);
        const models::StagePart part = mine.own_parts()[i];
        parts[static_cast<std::size_t>(index)] = part;
        std::vector<std::string> own, wanted;
        const auto want = [&](const std::vector<models::ParameterShape>& parameters) {
          for (const models::ParameterShape& each : parameters) wanted.push_back(each.name);
        };
        if (index == 0) want(plan.embed);
        for (std::int64_t block = part.first_block; block < part.end_block; ++block)
          want(plan.blocks[static_cast<std::size_t>(block)].parameters);
        if (index == count - 1) want(plan.head);
        for (const optim::NamedParameter& each : mine.parameters_of(index)) {
          EXPECT_TRUE(each.tensor.device().is_cpu()) << each.name;
          own.push_back(each.name);
          built.push_back(each.name);
        }
        std::sort(own.begin(), own.end());
        std::sort(wanted.begin(), wanted.end());
        EXPECT_EQ(own, wanted) << "stage " << index;
      }
    });
    std::int64_t next = 0;
    for (const models::StagePart& part : parts) {
      EXPECT_EQ(part.first_block, next);
      EXPECT_GE(part.blocks(), 5 / count);
      EXPECT_LE(part.blocks(), (5 + count - 1) / count);
      next = part.end_block;
    }
    EXPECT_EQ(next, 5);
    std::vector<std::string> whole;
    for (const models::ParameterShape& each : models::parameter_shapes(plan)) whole.push_back(each.name);
    std::sort(whole.begin(), whole.end());
    std::sort(built.begin(), built.end());
    EXPECT_EQ(built, whole);
  }
}

TEST(Job, WhatDoesNotFitSaysWhy) {
  const TrainConfig pp2 = config_of({.name = "pp2", .pp = 2});
  EXPECT_THROW(
      comm::run_ranks(1, 60s, [&](comm::World& world) { TrainingJob(world, pp2, small_data().open(pp2)); }),
      ConfigError);
  TrainConfig small = config_of({.name = "one"});
  small.model.vocabulary = 100;
  EXPECT_THROW(comm::run_ranks(
                   1, 60s, [&](comm::World& world) { TrainingJob(world, small, small_data().open(small)); }),
               ConfigError);
}

}  // namespace job_test
}  // namespace penstock::train
