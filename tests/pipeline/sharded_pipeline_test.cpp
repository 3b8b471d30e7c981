// Pipelines whose stages are sharded or replicated, with clipping over all parameters, compared with one
// process.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/compiled_stage.h"
#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/optimizer.h"
#include "penstock/pipeline.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace sharded_pipeline_test {

using namespace std::chrono_literals;
using test::kWidth;

constexpr int kSteps = 3, kMicrobatches = 4;
constexpr std::int64_t kRows = 16;  // per step, over all replicas
constexpr double kLimit = 0.05;     // every step is clipped

// A block with buffers; backward needs the old values of one of them.
struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(int number) : block(register_module("block", test::Block(number))) {
    factor = register_buffer("factor", 1 + 0.25 * test::values({kWidth}, 300 + number));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls.add_(1);
    return block->forward(x) * factor;
  }
  test::Block block;
  at::Tensor factor, calls;
};
TORCH_MODULE(Buffered);

StageModule two_blocks(int stage) {
  return StageModule::chain({StageModule(Buffered(2 * stage)), StageModule(Buffered(2 * stage + 1))});
}

struct Trained {
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;
};

std::vector<optim::NamedParameter> named(const StageModule& module, int stage) {
  std::vector<optim::NamedParameter> found;
  for (const at::Tensor& parameter : module.parameters())
    found.push_back({fmt::format("{}.{}", stage, found.size()), parameter});
  return found;
}

optim::SGD sgd(const std::vector<optim::NamedParameter>& parameters) {
  return optim::SGD(optim::decay_groups(parameters),
                    optim::SGDOptions{.lr = 0.5, .momentum = 0.9, .weight_decay = 0.01});
}

Trained one_process(int stages) {
  std::vector<StageModule> modules;
  std::vector<optim::NamedParameter> parameters;
  for (int stage = 0; stage < stages; ++stage) {
    modules.push_back(two_blocks(stage));
    for (const auto& each : named(modules.back(), stage)) parameters.push_back(each);
  }
  optim::SGD optimizer = sgd(parameters);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const test::Batch batch = test::plain_batch(step, kRows);
    Tree value = batch.args;
    for (const StageModule& module : modules) value = Tree::tuple({module.forward(value, {}).tensor()});
    test::square_loss()(value[0], batch.target).backward();
    trained.norms.push_back(optim::clip_grad_norm(optimizer.parameters(), kLimit).value());
    optimizer.step();
  }
  for (const auto& each : parameters) trained.parameters[each.name] = each.tensor.detach().clone();
  return trained;
}

enum class Mode { Shard, Replicate, Both, KeepASlice };

struct Layout {
  std::string schedule;
  int per_rank;
  Mode mode;
  int dp;
  TrialRun trial = TrialRun::Fake;  // a trial that needs real tensors would fail
  bool graphs = false;              // captured, with a backward in two graphs
};

void wrap(const StageModule& module, const comm::MeshGroups& mesh, Mode mode) {
  for (const auto& each : module.modules()) {
    if (mode == Mode::Replicate)
      replicate(*each, mesh);
    else
      fully_shard(
          *each, mesh,
          mode == Mode::KeepASlice ? ShardOptions{.reshard_after_forward = ReshardTo{2}} : ShardOptions{});
  }
}

void check(const Layout& layout) {
  constexpr int kPipeline = 2;
  const int stages = kPipeline * layout.per_rank;
  const Trained expected = one_process(stages);
  EXPECT_GT(expected.norms[0], kLimit);
  std::mutex mutex;
  std::map<std::string, at::Tensor> found;
  comm::run_ranks(kPipeline * layout.dp, 120s, [&](comm::World& world) {
    SCOPED_TRACE(
        fmt::format("{}, dp {}, mode {}", layout.schedule, layout.dp, static_cast<int>(layout.mode)));
    const bool both = layout.mode == Mode::Both;
    const comm::MeshGroups all(
        world,
        both ? init_device_mesh("cpu", {kPipeline, 2, layout.dp / 2}, {"pp", "replicas", "shards"},
                                world.rank(), world.size())
             : init_device_mesh("cpu", {kPipeline, layout.dp}, {"pp", "dp"}, world.rank(), world.size()));
    const comm::MeshGroups dp =
        all.with_mesh(both ? all.mesh().slice({"replicas", "shards"}) : all.mesh()["dp"]);
    const int own = world.rank() / layout.dp, replica = world.rank() % layout.dp;
    const schedule::Schedule schedule =
        schedule::generate(schedule::schedule_kind(layout.schedule), {.ranks = kPipeline,
                                                                      .stages_per_rank = layout.per_rank,
                                                                      .microbatches = kMicrobatches,
                                                                      .group_size = {}});
    std::vector<PipelineStage> mine;
    std::vector<optim::NamedParameter> parameters;
    for (const int stage : schedule.stages().stages_of(own)) {
      const StageModule module = two_blocks(stage);
      wrap(module, dp, layout.mode);
      for (const auto& each : named(module, stage)) parameters.push_back(each);
      StageOptions stage_options;
      stage_options.trial = layout.trial;
      CompiledStageOptions compiled;
      compiled.compile.split_backward = true;
      mine.emplace_back(layout.graphs ? compiled_stage(module, compiled) : module, stage, stages, at::kCPU,
                        stage_options);
    }
    PipelineOptions options{world};
    for (int rank = 0; rank < kPipeline; ++rank) options.ranks.push_back(rank * layout.dp + replica);
    PipelineRuntime pipeline(mine, schedule, test::square_loss(), options);
    optim::SGD optimizer = sgd(parameters);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const test::Batch batch = test::plain_batch(step, kRows);
      const auto share = [&](const at::Tensor& rows) {
        return rows.chunk(layout.dp)[static_cast<std::size_t>(replica)];
      };
      pipeline.step(Tree::tuple({share(batch.args[0].tensor())}), {}, Tree(share(batch.target.tensor())));
      const double norm =
          optim::clip_grad_norm(optimizer.parameters(), kLimit, {.groups = {all.group("pp")}}).value();
      EXPECT_NEAR(norm, expected.norms[static_cast<std::size_t>(step)], 1e-5 * norm);
      optimizer.step();
    }
    for (const PipelineStage& stage : mine)
      for (const auto& module : stage.module().modules())
        EXPECT_EQ(module->named_buffers()["calls"].item<int>(), kSteps * kMicrobatches);
    for (const auto& each : parameters) {
      EXPECT_TRUE(is_dtensor(each.tensor)) << "sharded or replicated again after the step";
      const at::Tensor whole = full_tensor(each.tensor.detach());
      const std::lock_guard lock(mutex);
      found[each.name] = whole;
    }
  });
  ASSERT_EQ(found.size(), expected.parameters.size());
  for (const auto& [name, value] : expected.parameters)
    EXPECT_LT((found.at(name) - value).abs().max().item<double>(), 1e-5) << name;
}

TEST(ShardedPipeline, Replicated) {
  check({"1F1B", 1, Mode::Replicate, 2});
  check({"Interleaved1F1B", 2, Mode::Replicate, 2});
  check({"ZBVZeroBubble", 2, Mode::Replicate, 2});
}
TEST(ShardedPipeline, Sharded) {
  check({"1F1B", 1, Mode::Shard, 2});
  check({"GPipe", 1, Mode::Shard, 4});
  check({"Interleaved1F1B", 2, Mode::Shard, 2});
  check({"ZBVZeroBubble", 2, Mode::Shard, 2});
}
TEST(ShardedPipeline, ReplicasOfShards) {
  check({"1F1B", 1, Mode::Both, 4});
  check({"InterleavedZeroBubble", 2, Mode::Both, 4});
}
TEST(ShardedPipeline, TriedOnRealTensors) {
  check({"1F1B", 1, Mode::Shard, 2, TrialRun::Real});
  check({"Interleaved1F1B", 2, Mode::Replicate, 2, TrialRun::Real});
  check({"1F1B", 1, Mode::KeepASlice, 4, TrialRun::Real});
}
TEST(ShardedPipeline, CapturedInTwoGraphs) {
  check({"ZBVZeroBubble", 2, Mode::Shard, 2, TrialRun::Fake, true});
  check({"DualPipeV", 2, Mode::Shard, 2, TrialRun::Fake, true});
  check({"InterleavedZeroBubble", 2, Mode::Both, 4, TrialRun::Fake, true});
}
TEST(ShardedPipeline, KeepingASlice) { check({"1F1B", 1, Mode::KeepASlice, 4}); }

}  // namespace sharded_pipeline_test
}  // namespace penstock
