// A hybrid model with every auxiliary loss under every kind of schedule: the gradients of all parameters, and
// the losses that are reported, are those of one process, in double precision.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/generators.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/models/language/loss_totals.h"
#include "penstock/pipeline.h"
#include "penstock/stage_module.h"
#include "penstock/step_context.h"
#include "penstock/world.h"
#include "tests/models/small_hybrid.h"

namespace penstock::models {
namespace hybrid_schedules_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::enlarge;
using test::small_hybrid;

constexpr int kMicrobatches = 4, kRuns = 2, kLength = 10;
constexpr double kTolerance = 1e-11;  // relative to the largest element of a tensor, in double precision

// Balance, router z, depth routing and multi-token prediction, whose block has experts too.
HybridOptions options_of_all() {
  HybridOptions options = small_hybrid("AEME");
  options.tie_head = true;
  options.depth_layers = {1, 2};
  options.depth_weight = 0.2;
  options.multi_token_depth = 1;
  options.multi_token_block = "E";
  options.multi_token_weight = 0.4;
  return options;
}

using Tensors = std::map<std::string, at::Tensor>;

struct Trained {
  Tensors gradients;                     // summed over the uses of a parameter, divided by the loss scale
  Tensors second;                        // the same of the second copy of the model
  std::map<std::string, double> losses;  // by name, summed over stages and forwards
};

void add(Tensors& sums, const std::string& name, const at::Tensor& term) {
  at::Tensor& sum = sums[name];
  sum = sum.defined() ? sum + term : term.clone();
}

TokenBatch batch_of(int run) {
  const at::Tensor all = torch::arange(kMicrobatches * (kLength + 1))
                             .mul(7 + run)
                             .add(run)
                             .remainder(19)
                             .view({kMicrobatches, -1});
  return {.tokens = all.narrow(1, 0, kLength).contiguous(),
          .targets = all.narrow(1, 1, kLength).contiguous()};
}

Trained train(const schedule::Schedule& schedule, double loss_scale) {
  const HybridOptions options = options_of_all();
  const schedule::StageMap& map = schedule.stages();
  const auto model = trainable_hybrid(options, 1.0 / kRuns);
  const auto parts = partition_model(model->plan(), map.chains().front().stages);
  Trained trained;
  std::mutex mutex;
  comm::run_ranks(schedule.ranks(), 60s, [&](comm::World& world) {
    std::vector<std::shared_ptr<ModelStage>> modules;
    std::vector<PipelineStage> stages;
    for (const int index : map.stages_of(world.rank())) {
      const auto stage =
          model->make_stage(parts[static_cast<std::size_t>(index - map.chain_of(index).first_stage)]);
      stage->to(at::kDouble);
      stage->set_initial_values(7);
      enlarge(*stage);
      stages.emplace_back(
          StageModule([stage](at::Tensor x, Tree more) { return stage->forward_with(x, more); }, {stage}),
          index, map.stages(), at::kCPU);
      modules.push_back(stage);
    }
    PipelineOptions how{world};
    how.loss_scale = loss_scale;
    PipelineRuntime pipeline(
        stages, schedule,
        [](const at::Tensor& logits, const at::Tensor& targets) {
          return token_loss(logits, targets, static_cast<double>(kLength * kRuns));
        },
        how);
    for (int run = 0; run < kRuns; ++run) {
      const StageInputs inputs = model->inputs(batch_of(run));
      pipeline.set_step(run);
      pipeline.step(inputs.args, inputs.keywords, inputs.target);
      pipeline.eval(inputs.args, inputs.keywords, inputs.target);  // must not count
    }
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < modules.size(); ++i) {
      const bool is_second = stages[i].index() >= map.chains().front().stages;
      for (const auto& item : modules[i]->named_parameters())
        if (item.value().grad().defined())
          add(is_second ? trained.second : trained.gradients, item.key(), item.value().grad() / loss_scale);
      for (const AuxiliaryLoss& loss : modules[i]->take_auxiliary_losses())
        trained.losses[loss.name] += loss.value.item<double>();
      EXPECT_TRUE(modules[i]->take_auxiliary_losses().empty());
    }
  });
  return trained;
}

const Trained& one_process() {
  static const Trained one = train(
      schedule::generate(ScheduleKind::GPipe,
                         {.ranks = 1, .stages_per_rank = 1, .microbatches = kMicrobatches, .group_size = {}}),
      1);
  return one;
}

void expect_equal(const Tensors& ours, const Tensors& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (const auto& [name, expected] : theirs) {
    ASSERT_TRUE(ours.contains(name)) << name;
    const double apart = (ours.at(name) - expected).abs().max().item<double>();
    EXPECT_LT(apart, kTolerance * expected.abs().max().item<double>()) << name;
  }
}

void expect_one_process(const Trained& ours) {
  expect_equal(ours.gradients, one_process().gradients);
  if (!ours.second.empty()) expect_equal(ours.second, one_process().gradients);
  ASSERT_EQ(ours.losses.size(), one_process().losses.size());
  for (const auto& [name, value] : one_process().losses)
    EXPECT_NEAR(ours.losses.at(name), value, kTolerance * std::abs(value)) << name;
}

TEST(HybridSchedules, TheModelHasEveryLossAndEveryGradient) {
  const Trained& one = one_process();
  ASSERT_EQ(one.losses.size(), 4u);
  for (const char* name : {"balance", "router_z", "depth_router", "multi_token"})
    EXPECT_GT(one.losses.at(name), 0) << name;
  EXPECT_EQ(one.losses.size(), options_of_all().plan().auxiliary.size());
  for (const AuxiliaryTerm& term : options_of_all().plan().auxiliary)
    EXPECT_TRUE(one.losses.contains(term.name) && term.weight > 0) << term.name;
  for (const ParameterShape& parameter : parameter_shapes(options_of_all().plan()))
    EXPECT_GT(one.gradients.at(parameter.name).abs().max().item<double>(), 0) << parameter.name;
}

class EverySchedule : public ::testing::TestWithParam<ScheduleKind> {};

TEST_P(EverySchedule, HasTheGradientsAndLossesOfOneProcess) {
  const ScheduleKind kind = GetParam();
  const int stages = schedule::required_stages_per_rank(kind).value_or(2);
  expect_one_process(train(
      schedule::generate(
          kind, {.ranks = 2, .stages_per_rank = stages, .microbatches = kMicrobatches, .group_size = {}}),
      /*loss_scale=*/8));
}

INSTANTIATE_TEST_SUITE_P(Kinds, EverySchedule, ::testing::ValuesIn(schedule::all_schedule_kinds()),
                         [](const auto& info) { return "Of" + std::string(schedule::to_text(info.param)); });

// Backwards in an order that no generator makes: the last microbatch first, input and weight gradients apart.
TEST(HybridSchedules, AScheduleFromAFile) {
  expect_one_process(train(schedule::parse_schedule("0F0,0F1,0F2,0F3,,,,0I3,0W3,0I1,0W1,0I0,0I2,0W2,0W0\n"
                                                    ",1F0,1F1,1F2,1F3,1I3,1B1,1B0,1I2,1W2,1W3\n"),
                           /*loss_scale=*/1));
}

// ---- LossTotals ----

AuxiliaryLoss loss_of(double value) { return {"balance", torch::tensor(value, at::kFloat), 0.5}; }

StepContext context_of(std::int64_t step, std::int64_t microbatch) {
  StepContext context;
  context.step = step;
  context.microbatch = microbatch;
  context.microbatches = 4;
  return context;
}

TEST(LossTotals, AForwardCountsOnceAndOnlyInAStep) {
  LossTotals totals;
  totals.add({loss_of(100)});
  EXPECT_TRUE(totals.take().empty());
  const auto within = [&](const StepContext& context, const std::vector<AuxiliaryLoss>& losses) {
    const StepGuard guard(context);
    totals.add(losses);
  };
  within(context_of(0, 1), {loss_of(2), {"other", torch::tensor(7.0), 1}});
  within(context_of(0, 0), {loss_of(1)});
  within(context_of(1, 0), {loss_of(4)});
  within(context_of(0, 1).recomputation(), {loss_of(50)});
  StepContext trial = context_of(0, 2);
  trial.trial = true;
  within(trial, {loss_of(60)});
  within(context_of(1, 0), {loss_of(4)});  // again
  const auto taken = totals.take();
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].name, "balance");
  EXPECT_EQ(taken[0].value.item<double>(), 7);
  EXPECT_EQ(taken[0].weight, 0.5);
  EXPECT_EQ(taken[1].value.item<double>(), 7);
  EXPECT_TRUE(totals.take().empty());
}

// Losses that nobody takes are added up: the memory is bounded and the sum is right.
TEST(LossTotals, ManyForwardsAreAddedUp) {
  LossTotals totals;
  const AuxiliaryLoss one = loss_of(1);
  for (int step = 0; step < 10000; ++step) {
    const StepGuard guard(context_of(step, 0));
    totals.add({one});
  }
  EXPECT_EQ(totals.take().at(0).value.item<double>(), 10000);
}

}  // namespace hybrid_schedules_test
}  // namespace penstock::models
