// Pipelines whose activations are distributed tensors: pipeline x tensor parallel, every schedule, compared
// with one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/step_context.h"
#include "tests/has_text.h"

namespace penstock {
namespace dtensor_pipeline_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;

constexpr std::int64_t kWidth = 6;
constexpr int kTensorParallel = 2;

at::Tensor weight_of(int stage) {
  return at::randn({kWidth, kWidth}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(40 + stage))) *
         0.5;
}

// Even stages split their outputs over the columns, odd ones take them split and gather: placements differ
// from border to border.
struct PartImpl : torch::nn::Module {
  PartImpl(int number, int count, const comm::MeshGroups* tensor_parallel)
      : stage(number), stages(count), mesh(tensor_parallel) {
    at::Tensor whole = weight_of(stage);
    weight = register_parameter(
        "weight", mesh == nullptr ? whole : distribute_tensor(whole, *mesh, {Shard{stage % 2 == 0 ? 0 : 1}}));
    const auto replicated = [&](const at::Tensor& tensor) {
      return mesh == nullptr ? tensor : distribute_tensor(tensor, *mesh, {Replicate{}});
    };
    factor = register_buffer("factor", replicated(at::linspace(0.5, 1.5, kWidth)));
    calls = register_buffer("calls", replicated(at::zeros({2})));
  }
  at::Tensor forward(at::Tensor x) {
    if (mesh != nullptr && stage == 0) x = from_local(x, *mesh, {Replicate{}});
    x = torch::linear(x, weight);
    if (mesh != nullptr && stage % 2 == 1) x = redistribute(x, {Replicate{}});
    // Backward of the product needs the old values of the buffer.
    x = torch::tanh(x) * factor;
    calls.add_(1);
    if (mesh != nullptr && stage == stages - 1) x = full_tensor(x);
    return x;
  }
  int stage, stages;
  const comm::MeshGroups* mesh;
  at::Tensor weight, factor, calls;
};
TORCH_MODULE(Part);

const auto square = [](const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
};

at::Tensor batch(int rows, int seed) {
  return at::randn({rows, kWidth}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)));
}

void expect_parity(ScheduleKind kind, int pipeline_ranks, TrialRun trial) {
  const int per_rank = schedule::required_stages_per_rank(kind).value_or(2);
  const int microbatches = 2 * pipeline_ranks, stages = pipeline_ranks * per_rank;
  const int parts = kind == ScheduleKind::DualPipe ? pipeline_ranks : stages;
  // Uneven, so that the local parts of microbatches differ.
  const at::Tensor x = batch(2 * microbatches + 1, 1), target = batch(2 * microbatches + 1, 2);

  std::map<int, at::Tensor> gradients, expected;
  std::vector<at::Tensor> losses;
  std::mutex mutex;
  comm::run_ranks(pipeline_ranks * kTensorParallel, 60s, [&](comm::World& world) {
    const comm::MeshGroups whole(world, init_device_mesh("cpu", {pipeline_ranks, kTensorParallel},
                                                         {"pp", "tp"}, world.rank(), world.size()));
    const comm::MeshGroups tensor_parallel = whole.with_mesh(whole.mesh()["tp"]);
    PipelineOptions options{world};
    for (int i = 0; i < pipeline_ranks; ++i)
      options.ranks.push_back(i * kTensorParallel + world.rank() % kTensorParallel);
    const schedule::Schedule order = schedule::generate(kind, {.ranks = pipeline_ranks,
                                                               .stages_per_rank = per_rank,
                                                               .microbatches = microbatches,
                                                               .group_size = {}});
    std::vector<PipelineStage> own;
    std::vector<Part> modules;
    for (const int index : order.stages().stages_of(world.rank() / kTensorParallel)) {
      modules.emplace_back(index % parts, parts, &tensor_parallel);
      StageOptions stage_options;
      stage_options.trial = trial;
      own.emplace_back(StageModule(modules.back()), index, stages, at::kCPU, stage_options);
    }
    PipelineRuntime pipeline(own, order, square, options);
    const StepResult result = pipeline.step(Tree::tuple({x}), {}, target);
    const StepResult again = pipeline.eval(Tree::tuple({x}), {}, target);
    std::vector<at::Tensor> full;
    for (const Part& module : modules) {
      full.push_back(full_tensor(module->weight.grad()));
      // In a bidirectional pipeline every stage has half of the microbatches.
      const int runs = 2 * (kind == ScheduleKind::DualPipe ? microbatches / 2 : microbatches);
      EXPECT_TRUE(to_local(module->calls).equal(at::full({2}, static_cast<double>(runs))));
      EXPECT_TRUE(to_local(module->factor).equal(at::linspace(0.5, 1.5, kWidth)));
    }
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < modules.size(); ++i) gradients[own[i].index()] = full[i];
    if (world.rank() % kTensorParallel == 0)
      losses.insert(kind == ScheduleKind::DualPipe && world.rank() == 0 ? losses.end() : losses.begin(),
                    result.losses.begin(), result.losses.end());
  });

  std::vector<Part> model;
  for (int i = 0; i < parts; ++i) model.emplace_back(i, parts, nullptr);
  const std::vector<Tree> xs = split_tree(x, microbatches), targets = split_tree(target, microbatches);
  ASSERT_EQ(losses.size(), xs.size());
  for (std::size_t m = 0; m < xs.size(); ++m) {
    at::Tensor y = xs[m].tensor();
    for (Part& part : model) y = part->forward(y);
    const at::Tensor loss = square(y, targets[m].tensor());
    EXPECT_TRUE(at::allclose(losses[m], loss, 1e-5, 1e-6)) << "loss " << m;
    (loss / microbatches).backward();
  }
  ASSERT_EQ(gradients.size(), static_cast<std::size_t>(stages));
  for (const auto& [stage, gradient] : gradients)
    EXPECT_TRUE(
        at::allclose(gradient, model[static_cast<std::size_t>(stage % parts)]->weight.grad(), 1e-4, 1e-6))
        << "stage " << stage;
}

class DistributedActivations : public testing::TestWithParam<ScheduleKind> {};

// Fake: a trial run that needs real tensors would fail.
TEST_P(DistributedActivations, TwoByTwo) { expect_parity(GetParam(), 2, TrialRun::Fake); }
TEST_P(DistributedActivations, TwoByTwoTriedOnRealTensors) { expect_parity(GetParam(), 2, TrialRun::Real); }
TEST_P(DistributedActivations, FourByTwo) { expect_parity(GetParam(), 4, TrialRun::Auto); }

INSTANTIATE_TEST_SUITE_P(Schedules, DistributedActivations, testing::ValuesIn(schedule::all_schedule_kinds()),
                         [](const testing::TestParamInfo<ScheduleKind>& info) {
                           return std::string(schedule::to_text(info.param));
                         });

// Equal placements, but on another mesh than in the trial run.
TEST(DistributedOutputs, OnAnotherMeshThanAgreedAreRefused) {
  std::mutex mutex;
  std::string refused;  // by the stage that made it; the others learn of it in various ways
  const auto body = [&](comm::World& world) {
    const auto mesh_of_axis = [&](const char* name) {
      const comm::MeshGroups whole(world, init_device_mesh("cpu", {2, 2}, {"pp", name}, world.rank(), 4));
      return whole.with_mesh(whole.mesh()[name]);
    };
    const comm::MeshGroups agreed = mesh_of_axis("tp"), other = mesh_of_axis("cp");
    const int stage = world.rank() / 2;
    const StageModule module(
        [&](at::Tensor x) {
          if (stage == 1) return full_tensor(x);
          return from_local(x, StepContext::current()->trial ? agreed : other, {Shard{1}});
        },
        {});
    PipelineOptions options{world};
    options.ranks = {world.rank() % 2, 2 + world.rank() % 2};
    StageOptions stage_options;
    stage_options.find_mesh = [&](const MeshKey&) { return std::optional(agreed); };
    ScheduleGPipe pipeline(PipelineStage(module, stage, 2, at::kCPU, stage_options), 2, {}, options);
    try {
      pipeline.eval(Tree::tuple({batch(4, 1)}));
    } catch (const PipeliningMetadataError& error) {
      const std::lock_guard lock(mutex);
      refused = error.what();
      throw;
    }
  };
  EXPECT_ANY_THROW(comm::run_ranks(4, 60s, body));
  EXPECT_TRUE(test::has_text(refused, "output 0 of stage 0")) << refused;
}

}  // namespace dtensor_pipeline_test
}  // namespace penstock
