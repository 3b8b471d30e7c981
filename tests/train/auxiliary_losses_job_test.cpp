// Auxiliary losses as a step reports them: by name, and in every layout the values of one process.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/trainer.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace auxiliary_losses_job_test {

using namespace std::chrono_literals;
using namespace penstock::test;

constexpr int kSteps = 2;
constexpr double kTolerance = 1e-5;  // relative; sums over stages and replicas are rounded differently

const Options kAll = with(with(hybrid_blocks(), hybrid_losses()),
                          {"--balance_weight", "0.05", "--depth_weight", "0.2", "--tie_head", "false"});

std::vector<StepOutcome> train(const Layout& layout, const Options& options = kAll) {
  return train_job(layout, options, {.steps = kSteps, .validates_first = true}).steps;
}

void expect_near(const std::vector<StepOutcome>& ours, const std::vector<StepOutcome>& theirs) {
  for (std::size_t step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(ours[step].loss, theirs[step].loss, kTolerance * theirs[step].loss);
    ASSERT_EQ(ours[step].auxiliary.size(), theirs[step].auxiliary.size());
    for (std::size_t i = 0; i < theirs[step].auxiliary.size(); ++i) {
      const LossTerm &mine = ours[step].auxiliary[i], &other = theirs[step].auxiliary[i];
      EXPECT_EQ(mine.name, other.name);
      EXPECT_EQ(mine.weight, other.weight);
      EXPECT_NEAR(mine.value, other.value, kTolerance * other.value) << mine.name << " in step " << step;
    }
  }
}

TEST(AuxiliaryLossesJob, EveryLayoutReportsTheValuesOfOneProcess) {
  const std::vector<StepOutcome> one = train({.name = "one", .microbatch_size = 4});
  const std::vector<std::pair<std::string, double>> expected{
      {"balance", 0.05}, {"router_z", 0.1}, {"depth_router", 0.2}, {"multi_token", 0.3}};
  ASSERT_EQ(one[0].auxiliary.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(one[0].auxiliary[i].name, expected[i].first);
    EXPECT_EQ(one[0].auxiliary[i].weight, expected[i].second);
    EXPECT_GT(one[0].auxiliary[i].value, 0);
    EXPECT_NE(one[0].auxiliary[i].value, one[1].auxiliary[i].value);
  }
  // The second prediction is about as hard as the first.
  EXPECT_NEAR(one[0].auxiliary[3].value, one[0].loss, 0.1 * one[0].loss);
  const auto near = [&](const Layout& layout, const Options& more = {}) {
    SCOPED_TRACE(layout.name);
    expect_near(train(layout, with(kAll, more)), one);
  };
  near({.name = "pp2", .pp = 2, .microbatch_size = 4});
  near({.name = "pp4", .pp = 4, .microbatch_size = 4});
  near({.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble", .microbatch_size = 4});
  near({.name = "DualPipe", .pp = 2, .virtual_stages = 2, .schedule = "DualPipe", .microbatch_size = 4});
  near({.name = "pp2 dp2", .pp = 2, .dp = 2});
  near({.name = "ep2", .dp = 2}, {"--ep", "2"});
  near({.name = "shard2", .dp = 2}, {"--shard", "2"});
  near({.name = "two runs", .pp = 2, .microbatch_size = 4, .accumulation = 2, .microbatches = 2});
}

// Tensor-parallel ranks have the same values, which count once.
TEST(AuxiliaryLossesJob, TensorParallelRanksCountOnce) {
  const Options experts{"--pattern", "AEFE", "--attention_feed", "false",
                        "--experts", "4",    "--expert_width",   "16",
                        "--lr",      "0.01"};
  const std::vector<StepOutcome> one = train({.name = "one"}, experts);
  EXPECT_EQ(one[0].auxiliary.size(), 2u);
  expect_near(train({.name = "pp2 tp2", .pp = 2, .tp = 2}, experts), one);
}

TEST(AuxiliaryLossesJob, AModelWithoutAnyReportsNone) {
  const TrainConfig config = config_of({.name = "pp2", .pp = 2});
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    EXPECT_TRUE(job.train_step().auxiliary.empty());
  });
}

// A model that does not list what its stages report.
class Unlisted : public models::TrainableModel {
 public:
  explicit Unlisted(const TrainConfig& config)
      : model_(models::trainable_hybrid(hybrid_options(config.model))), plan_(model_->plan()) {
    plan_.auxiliary.pop_back();
  }
  const models::ModelPlan& plan() const override { return plan_; }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    return model_->make_stage(part);
  }
  models::StageInputs inputs(const models::TokenBatch& batch) const override { return model_->inputs(batch); }

 private:
  std::shared_ptr<models::TrainableModel> model_;
  models::ModelPlan plan_;
};

TEST(AuxiliaryLossesJob, ALossThatThePlanLacksIsNamed) {
  register_model("unlisted", [](const TrainConfig& config) { return std::make_shared<Unlisted>(config); });
  const std::string message = message_of<StateError>([] {
    train({.name = "one"}, with(kAll, {"--model.type", "unlisted"}));
  });
  EXPECT_TRUE(has_text(message, "multi_token")) << message;
}

}  // namespace auxiliary_losses_job_test
}  // namespace penstock::train
