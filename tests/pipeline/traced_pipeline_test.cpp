// Pipelines traced from whole modules equal the module in one process, in every schedule.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/shared_parameters.h"
#include "penstock/trace_pipeline.h"
#include "penstock/world.h"
#include "tests/pipeline/parity_check.h"
#include "tests/pipeline/traced_models.h"

namespace penstock {
namespace traced_pipeline_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Batch;
using test::kSteps;
using test::Layout;
using test::TracedModel;

using Tensors = std::map<std::string, at::Tensor>;

// What a model has after some steps.
struct Trained {
  std::vector<std::vector<at::Tensor>> losses;  // by step
  Tree evaluation;
  Tensors gradients, buffers;
  std::map<int, Tensors> of_copy;  // gradients, by copy of a bidirectional pipeline
};

Tree one_microbatch(const TracedModel& model, const Layout& layout, bool kwargs) {
  const Batch batch = model.batch(0, layout.microbatches());
  const Microbatches parts = split_microbatches(batch.args, batch.kwargs, layout.microbatches());
  return kwargs ? parts.kwargs[0] : parts.args[0];
}

Trained in_one_process(const TracedModel& model, const Layout& layout) {
  const StageModule module = model.module();
  const auto& root = *module.modules().at(0);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = model.batch(step, layout.microbatches());
    const Microbatches parts = split_microbatches(batch.args, batch.kwargs, layout.microbatches());
    const std::vector<Tree> targets = split_tree(batch.target, layout.microbatches());
    // A tied parameter has several names.
    std::set<const at::TensorImpl*> distinct;
    Tensors parameters;
    for (const auto& item : root.named_parameters())
      if (distinct.insert(item.value().unsafeGetTensorImpl()).second) parameters[item.key()] = item.value();
    // As the pipeline adds to the gradients of earlier steps: at the scale of the sum.
    for (auto& [name, parameter] : parameters)
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(layout.microbatches());
    auto& losses = trained.losses.emplace_back();
    for (std::size_t m = 0; m < parts.count(); ++m) {
      const at::Tensor loss = model.loss(
          module.forward(parts.args[m], module.takes_kwargs() ? parts.kwargs[m] : Tree()), targets[m]);
      loss.backward();
      losses.push_back(loss.detach());
    }
    for (auto& [name, parameter] : parameters)
      if (parameter.grad().defined()) parameter.mutable_grad().div_(layout.microbatches());
  }
  for (const auto& item : root.named_parameters()) trained.gradients[item.key()] = item.value().grad();
  for (const auto& item : root.named_buffers()) trained.buffers[item.key()] = item.value().clone();
  const at::NoGradGuard no_grad;
  for (const auto& each : module.modules()) each->eval();
  const Batch batch = model.batch(kSteps, layout.microbatches());
  const Microbatches parts = split_microbatches(batch.args, batch.kwargs, layout.microbatches());
  std::vector<Tree> outputs;
  for (std::size_t m = 0; m < parts.count(); ++m)
    outputs.push_back(module.forward(parts.args[m], module.takes_kwargs() ? parts.kwargs[m] : Tree()));
  trained.evaluation = merge_microbatches(outputs);
  return trained;
}

void run_traced(comm::World& world, const TracedModel& model, const Layout& layout, Trained& trained,
                std::mutex& mutex) {
  const schedule::Schedule whole =
      schedule::generate(layout.kind, {.ranks = layout.ranks,
                                       .stages_per_rank = layout.stages_per_rank(),
                                       .microbatches = layout.microbatches(),
                                       .group_size = {}});
  const StageModule module = model.module();
  const Pipe pipe = trace_pipeline(module, one_microbatch(model, layout, false),
                                   one_microbatch(model, layout, true), model.split(layout.parts()));
  ASSERT_EQ(pipe.stages(), layout.parts());
  BuildStageOptions build;
  build.copies = layout.stages() / layout.parts();
  build.group = world.group();
  std::vector<PipelineStage> stages;
  for (const int index : whole.stages().stages_of(world.rank()))
    stages.push_back(build_stage(pipe, index, at::kCPU, build));
  PipelineOptions options{world};
  options.skips = pipe.skips(build.copies);
  options.info = pipe.info();
  PipelineRuntime pipeline(stages, whole, model.loss, options);
  std::optional<SharedParameters> shared;
  if (model.tied)
    shared.emplace(pipe.ties(), parameter_uses(stages, whole.stages()), SharedParameterOptions{world});
  const bool second_half = layout.kind == ScheduleKind::DualPipe && world.rank() == 0;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = model.batch(step, layout.microbatches());
    const StepResult result = pipeline.step(batch.args, batch.kwargs, batch.target);
    EXPECT_EQ(pipeline.report().trials, 0) << "records come from the trace";
    EXPECT_TRUE(pipeline.report().is_static);
    const std::lock_guard lock(mutex);
    trained.losses.resize(kSteps);
    auto& losses = trained.losses[static_cast<std::size_t>(step)];
    losses.insert(second_half ? losses.end() : losses.begin(), result.losses.begin(), result.losses.end());
  }
  if (shared) shared->sum_gradients();
  {
    const std::lock_guard lock(mutex);
    for (const PipelineStage& stage : stages) {
      const auto& root = *stage.module().modules().at(0);
      Tensors& of_copy = trained.of_copy[stage.index() / layout.parts()];
      for (const auto& item : root.named_parameters()) {
        // The first use of a tied parameter has the sum of all.
        if (shared && shared->is_further_use(item.value())) continue;
        of_copy[item.key()] = item.value().grad().defined() ? item.value().grad().clone() : at::Tensor();
      }
      for (const auto& item : root.named_buffers()) trained.buffers[item.key()] = item.value().clone();
    }
  }
  for (const PipelineStage& stage : stages)
    for (const auto& each : stage.module().modules()) each->eval();
  const Batch batch = model.batch(kSteps, layout.microbatches());
  const StepResult result = pipeline.eval(batch.args, batch.kwargs);
  const std::lock_guard lock(mutex);
  if (result.output && layout.kind != ScheduleKind::DualPipe) trained.evaluation = *result.output;
}

void expect_same_tree(const Tree& actual, const Tree& expected) {
  const std::vector<at::Tensor> a = tensors_of(actual), b = tensors_of(expected);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < b.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << "output " << i;
}

// Losses, outputs and buffers have the same bits. The schedule determines the order of microbatches in the
// sums of gradients; where it is that of one process, gradients have the same bits, too, and else they are
// compared within 1e-5 of the largest.
void expect_parity(const TracedModel& model, const Layout& layout) {
  SCOPED_TRACE(model.name + ", " + std::string(schedule::to_text(layout.kind)));
  Trained actual;
  std::mutex mutex;
  try {
    comm::run_ranks(layout.ranks, 60s,
                    [&](comm::World& world) { run_traced(world, model, layout, actual, mutex); });
  } catch (const std::exception& error) {
    FAIL() << error.what();
  }
  const Trained expected = in_one_process(model, layout);
  for (std::size_t step = 0; step < kSteps; ++step) {
    ASSERT_EQ(actual.losses[step].size(), expected.losses[step].size());
    for (std::size_t m = 0; m < expected.losses[step].size(); ++m)
      EXPECT_TRUE(actual.losses[step][m].equal(expected.losses[step][m]))
          << "loss " << m << " of step " << step;
  }
  const bool in_order = layout.kind == ScheduleKind::OneFOneB && !model.tied;
  for (const auto& [copy, gradients] : actual.of_copy) {
    std::size_t compared = 0;
    for (const auto& [name, gradient] : gradients) {
      ASSERT_TRUE(expected.gradients.contains(name)) << name;
      ++compared;
      if (in_order && gradient.defined()) {
        EXPECT_TRUE(gradient.equal(expected.gradients.at(name))) << name;
      } else {
        test::expect_close(gradient, expected.gradients.at(name), name);
      }
    }
    EXPECT_GE(compared, expected.gradients.size() - (model.tied ? 1 : 0));
  }
  if (layout.kind == ScheduleKind::DualPipe) return;
  expect_same_tree(actual.evaluation, expected.evaluation);
  ASSERT_EQ(actual.buffers.size(), expected.buffers.size());
  for (const auto& [name, buffer] : expected.buffers)
    EXPECT_TRUE(actual.buffers.at(name).equal(buffer)) << name;
}

const std::vector<Layout> kLayouts = {{ScheduleKind::OneFOneB, 4},
                                      {ScheduleKind::GPipe, 3},
                                      {ScheduleKind::Interleaved1F1B, 2},
                                      {ScheduleKind::LoopedBFS, 2},
                                      {ScheduleKind::InterleavedZeroBubble, 2},
                                      {ScheduleKind::ZBVZeroBubble, 2},
                                      {ScheduleKind::DualPipeV, 2},
                                      {ScheduleKind::ZB2P, 2},
                                      {ScheduleKind::VHalf, 2},
                                      {ScheduleKind::VMin, 2},
                                      {ScheduleKind::DualPipe, 2}};

TEST(TracedPipeline, EveryModelInEverySchedule) {
  for (const TracedModel& model : test::traced_models())
    for (const Layout& layout : kLayouts) {
      // Copies count batches and ties on their own.
      if (layout.kind == ScheduleKind::DualPipe && (model.has_buffers || model.tied)) continue;
      expect_parity(model, layout);
    }
}

TEST(TracedPipeline, RandomModelsAtRandomPlaces) {
  for (const Layout& layout : {Layout{ScheduleKind::OneFOneB, 3}, Layout{ScheduleKind::ZBVZeroBubble, 2},
                               Layout{ScheduleKind::DualPipeV, 2}, Layout{ScheduleKind::Interleaved1F1B, 2}})
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      TracedModel model = test::random_model(seed);
      model.module = [seed, parts = layout.parts()] { return StageModule(test::RandomNet(seed, parts)); };
      expect_parity(model, layout);
    }
}

TEST(TracedPipeline, AutomaticCutsOfEveryModel) {
  for (TracedModel model : test::traced_models()) {
    model.split = [](int stages) { return PipeSplit::into(stages); };
    expect_parity(model, {ScheduleKind::OneFOneB, 3});
    expect_parity(model, {ScheduleKind::ZBVZeroBubble, 2});
  }
}

}  // namespace traced_pipeline_test
}  // namespace penstock
