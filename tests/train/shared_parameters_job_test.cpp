// Training with parameters that several stages use: a table of relation biases on every stage with attention,
// and an embedding that head and multi-token prediction use again. Compared with one process; checkpoints
// move between layouts; invalid ties fail on every rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/hybrid_metadata.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "penstock/trainer.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace shared_parameters_job_test {

using namespace std::chrono_literals;
using namespace penstock::test;

// The hybrid model, with relations between tokens that a program computes. `change` changes its plan or its
// stages.
class WithRelations : public models::TrainableModel {
 public:
  enum class Change { None, UnknownTie, FrozenCopy };
  explicit WithRelations(const TrainConfig& config, Change change = Change::None)
      : model_(models::trainable_hybrid(hybrid_options(config.model),
                                        1.0 / static_cast<double>(config.training.accumulation))),
        plan_(model_->plan()),
        change_(change) {
    if (change == Change::UnknownTie) plan_.tied.push_back("embed.wieght");
  }
  const models::ModelPlan& plan() const override { return plan_; }
  std::shared_ptr<models::ModelStage> make_stage(const models::StagePart& part) const override {
    auto stage = model_->make_stage(part);
    if (change_ == Change::FrozenCopy && part.index == 2)
      stage->named_parameters()["relations.weight"].set_requires_grad(false);
    return stage;
  }
  models::StageInputs inputs(const models::TokenBatch& batch) const override {
    models::TokenBatch whole = batch;
    const at::Tensor same = batch.tokens.unsqueeze(1).eq(batch.tokens.unsqueeze(2));
    const at::Tensor near = batch.tokens.remainder(3).unsqueeze(1).eq(batch.tokens.remainder(5).unsqueeze(2));
    whole.metadata = models::HybridMetadata{.relations = at::stack({same, near}, 1)}.keywords();
    return model_->inputs(whole);
  }
  void check_tensor_parallel(int ranks) const override { model_->check_tensor_parallel(ranks); }

 private:
  std::shared_ptr<models::TrainableModel> model_;
  models::ModelPlan plan_;
  Change change_;
};

void register_models() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto add = [](const std::string& name, WithRelations::Change change) {
      register_model(name, [change](const TrainConfig& config) {
        return std::make_shared<WithRelations>(config, change);
      });
    };
    add("with relations", WithRelations::Change::None);
    add("with an unknown tie", WithRelations::Change::UnknownTie);
    add("with a frozen copy", WithRelations::Change::FrozenCopy);
  });
}

// Attention on three of four blocks, so that in a pipeline of four one rank has no relations.
const Options kBlocks = {"--pattern",      "AEAA", "--attention_feed", "false", "--experts",   "4",
                         "--expert_width", "16",   "--relations",      "2",     "--clip_norm", "0.1",
                         "--partition",    "count"};

Options of_type(const std::string& type, const Options& more = {}) {
  return with(with(kBlocks, {"--model.type", type}), more);
}

const Options kRelations = of_type("with relations", {"--tie_head", "false"});
// The embedding is used at the head, for multi-token prediction, or both.
const Options kTied =
    of_type("with relations", {"--tie_head", "true", "--multi_token_depth", "1", "--multi_token_block", "E"});

TrainedJob train(const Layout& layout, const Options& options, JobRun run = {}) {
  register_models();
  run.keeps.parameters = true;
  return train_job(layout, options, run);
}

// Gradients are added in another order than in one process: float32 rounding.
void expect_near(const TrainedJob& ours, const TrainedJob& theirs) {
  expect_near_steps(ours, theirs);
  expect_near_tensors(ours.parameters, theirs.parameters);
}

struct Shared {
  std::string name;
  Options options;
};

class SharedParametersJob : public ::testing::TestWithParam<Shared> {};

TEST_P(SharedParametersJob, PipelinesAgreeWithOneProcess) {
  const Options& options = GetParam().options;
  const TrainedJob one = train({.name = "one", .microbatch_size = 4}, options);
  // The relations matter and are trained.
  const TrainedJob start = train({.name = "one", .microbatch_size = 4}, options, {.steps = 1});
  EXPECT_FALSE(one.parameters.at("relations.weight").equal(start.parameters.at("relations.weight")));
  const auto near = [&](const Layout& layout, const Options& more = {}) {
    SCOPED_TRACE(layout.name);
    expect_near(train(layout, with(options, more)), one);
  };
  near({.name = "pp2", .pp = 2, .microbatch_size = 4});
  near({.name = "pp4", .pp = 4, .schedule = "GPipe", .microbatch_size = 4});
  near({.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble", .microbatch_size = 4});
  near({.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV", .microbatch_size = 4});
  near({.name = "pp2 dp2", .pp = 2, .dp = 2});
  near({.name = "pp2 shard2", .pp = 2, .dp = 2}, {"--shard", "2"});
  near({.name = "ZBV shard2", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"},
       {"--shard", "2"});
  near({.name = "two runs", .pp = 2, .microbatch_size = 4, .accumulation = 2, .microbatches = 2});
  near({.name = "tp2", .tp = 2, .microbatch_size = 4});
  near({.name = "ZBV tp2",
        .pp = 2,
        .virtual_stages = 2,
        .tp = 2,
        .schedule = "ZBVZeroBubble",
        .microbatch_size = 4});
}

TEST_P(SharedParametersJob, CheckpointsMoveBetweenLayouts) {
  const Options& options = GetParam().options;
  const TrainedJob whole = train({.name = "one", .microbatch_size = 4}, options, {.steps = 4});
  const ScratchFolder scratch;
  train({.name = "pp4", .pp = 4, .microbatch_size = 4}, options, {.steps = 2, .to = &scratch});
  for (const Layout& layout :
       {Layout{.name = "one", .microbatch_size = 4},
        Layout{
            .name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble", .microbatch_size = 4},
        Layout{.name = "shard", .pp = 2, .dp = 2}}) {
    SCOPED_TRACE(layout.name);
    const Options more = with(options, {"--shard", layout.name == "shard" ? "2" : "1"});
    expect_near(train(layout, more, {.steps = 4, .from = &scratch}), whole.after(2));
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, SharedParametersJob,
                         ::testing::Values(Shared{"Relations", kRelations},
                                           Shared{"RelationsAndATie", kTied}),
                         [](const auto& info) { return info.param.name; });

// Without relations in the data no copy has a gradient: none is updated, and the rest has the same bits.
TEST(SharedParametersWithoutGradients, AreNotUpdated) {
  const Options options = with(kBlocks, {"--data.structure", "none"});
  const TrainedJob one = train({.name = "one"}, options);
  const TrainedJob start = train({.name = "one"}, options, {.steps = 0});
  for (const Layout& layout :
       {Layout{.name = "pp4", .pp = 4},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}}) {
    SCOPED_TRACE(layout.name);
    const TrainedJob seen = train(layout, options);
    EXPECT_EQ(seen.losses(), one.losses());
    EXPECT_TRUE(seen.parameters.at("relations.weight").equal(start.parameters.at("relations.weight")));
  }
}

// One process adds the gradients of all blocks at once.
TEST(SharedParametersParity, ExpectsTheSameBitsOnlyOfTwoUses) {
  register_models();
  const Layout two{.name = "pp2", .pp = 2};
  EXPECT_FALSE(expects_same_bits(config_of(two, kTied)));
  Options tied = kTied;
  *(std::find(tied.begin(), tied.end(), "--relations") + 1) = "0";
  EXPECT_TRUE(expects_same_bits(config_of(two, tied)));
}

// The error of every rank of a job that cannot be built.
void expect_refused(const std::string& type, const std::string& what) {
  register_models();
  const TrainConfig config = config_of({.name = "pp4", .pp = 4}, of_type(type));
  std::mutex mutex;
  int refused = 0;
  comm::run_ranks(4, 60s, [&](comm::World& world) {
    const std::string message =
        message_of<ValueError>([&] { TrainingJob(world, config, small_data().open(config)); });
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(has_text(message, what));
    ++refused;
  });
  EXPECT_EQ(refused, 4);
}

TEST(InvalidTies, FailOnEveryRank) {
  expect_refused("with an unknown tie", "tie of (embed.wieght): got embed.wieght, which no stage has");
  expect_refused("with a frozen copy", "tie of (relations.weight): relations.weight of stage 2");
}

}  // namespace shared_parameters_job_test
}  // namespace penstock::train
