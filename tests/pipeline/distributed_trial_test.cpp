// Trial runs of sharded and tensor-parallel stages: on fake tensors, or on real ones, but never with
// communication.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "penstock/dtensor.h"
#include "penstock/fake.h"
#include "penstock/fully_shard.h"
#include "penstock/pipeline.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/pipeline/trial_kinds.h"

namespace penstock {
namespace distributed_trial_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;
using test::kTrials;
using test::kWidth;
using test::name_of;
using test::values;
using test::with;

// A stage without distributed parameters that gets a distributed tensor.
TEST(DistributedTrial, ADistributedArgumentAtAPlainStage) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(4, 30s, [&](comm::World& world) {
      const comm::MeshGroups all(world,
                                 init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), world.size()));
      const comm::MeshGroups tp = all.with_mesh(all.mesh()["tp"]);
      const int stage = world.rank() / 2;
      StageOptions stage_options = with(trial);
      stage_options.find_mesh = [&](const MeshKey&) { return std::optional(tp); };
      const StageModule module(
          [stage](at::Tensor x, const Tree& kwargs) {
            const at::Tensor h = x * kwargs["k"].tensor();
            return stage == 1 ? full_tensor(h) : h;
          },
          {});
      PipelineOptions options{world};
      options.ranks = {world.rank() % 2, 2 + world.rank() % 2};
      ScheduleGPipe pipeline(PipelineStage(module, stage, 2, at::kCPU, stage_options), 2, {}, options);
      const at::Tensor x = values({4, kWidth}, 1), k = values({4, kWidth}, 2);
      const auto placed = [&](const at::Tensor& tensor) { return distribute_tensor(tensor, tp, {Shard{1}}); };
      const StepResult result = pipeline.eval(Tree::tuple({placed(x)}), Tree::dict({{"k", placed(k)}}));
      if (stage == 1) {
        EXPECT_TRUE(at::allclose(result.output->tensor(), x * k * k, 1e-5, 1e-6)) << name_of(trial);
      }
    });
}

struct ShardedPartImpl : torch::nn::Module {
  explicit ShardedPartImpl(int stage, bool reads = false)
      : reads_values(reads), block(register_module("block", Block(stage))) {
    factor = register_buffer("factor", values({kWidth}, 60 + stage));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls.add_(1);
    // No value decides anything, but a fake tensor has no values.
    if (reads_values) x.detach().sum().item<double>();
    const at::Tensor h = block->forward(x.to(block->weight.scalar_type()));
    // A view of a parameter in an operator of its own.
    return (h.matmul(block->weight.t()) * factor).to(at::kFloat);
  }
  bool reads_values;
  Block block;
  at::Tensor factor, calls;
};
TORCH_MODULE(ShardedPart);

// Two replicas of a pipeline share sharded stages. Their microbatches have different shapes, and a shape is
// new to one replica and known to the other at different steps: a trial that gathered would wait for a
// replica that makes none.
void train_replicas(TrialRun trial, int pipeline_ranks, bool reads_values) {
  constexpr int kReplicas = 2;
  const std::vector<std::vector<std::int64_t>> rows = {
      {4, 6}, {4, 4}, {8, 4}, {4, 8}};  // by step and replica, of two microbatches
  std::mutex mutex;
  std::map<int, at::Tensor> found;
  comm::run_ranks(pipeline_ranks * kReplicas, 30s, [&](comm::World& world) {
    const comm::MeshGroups all(world, init_device_mesh("cpu", {pipeline_ranks, kReplicas}, {"pp", "dp"},
                                                       world.rank(), world.size()));
    const int stage = world.rank() / kReplicas, replica = world.rank() % kReplicas;
    ShardedPart module(stage, reads_values);
    fully_shard(*module, all.with_mesh(all.mesh()["dp"]));
    PipelineOptions options{world};
    for (int rank = 0; rank < pipeline_ranks; ++rank) options.ranks.push_back(rank * kReplicas + replica);
    ScheduleGPipe pipeline(PipelineStage(StageModule(module), stage, pipeline_ranks, at::kCPU, with(trial)),
                           2, test::square_loss(), options);
    for (std::size_t step = 0; step < rows.size(); ++step) {
      const auto mine = rows[step][static_cast<std::size_t>(replica)];
      const int seed = static_cast<int>(100 * step) + replica;
      pipeline.step(Tree::tuple({values({mine, kWidth}, seed)}), {}, values({mine, kWidth}, seed + 50));
    }
    EXPECT_EQ(module->calls.item<int>(), 2 * static_cast<int>(rows.size()));
    const at::Tensor gradient = full_tensor(module->block->weight.grad());
    const std::lock_guard lock(mutex);
    found[stage] = gradient;
  });

  std::vector<ShardedPart> model;
  for (int stage = 0; stage < pipeline_ranks; ++stage) model.emplace_back(stage);
  for (std::size_t step = 0; step < rows.size(); ++step)
    for (int replica = 0; replica < kReplicas; ++replica) {
      const auto mine = rows[step][static_cast<std::size_t>(replica)];
      const int seed = static_cast<int>(100 * step) + replica;
      const std::vector<at::Tensor> xs = values({mine, kWidth}, seed).chunk(2),
                                    targets = values({mine, kWidth}, seed + 50).chunk(2);
      for (std::size_t m = 0; m < 2; ++m) {
        at::Tensor h = xs[m];
        for (ShardedPart& part : model) h = part->forward(h);
        ((h - targets[m]).pow(2).mean() / (2 * kReplicas)).backward();
      }
    }
  for (int stage = 0; stage < pipeline_ranks; ++stage)
    EXPECT_TRUE(at::allclose(found.at(stage), model[static_cast<std::size_t>(stage)]->block->weight.grad(),
                             1e-4, 1e-5))
        << name_of(trial) << ", stage " << stage;
}

TEST(DistributedTrial, ReplicasWhoseMicrobatchesDiffer) {
  for (const TrialRun trial : kTrials) {
    train_replicas(trial, 2, false);
    train_replicas(trial, 3, false);
  }
  // Tried on fake tensors, then on real ones.
  train_replicas(TrialRun::Auto, 3, true);
}

// Mixed precision: inputs are cast where they meet a parameter, also in a trial.
TEST(DistributedTrial, ShardedStagesCastInTheirTrial) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(2, 30s, [&](comm::World& world) {
      const comm::MeshGroups dp(world, init_device_mesh("cpu", {2}, {"dp"}, world.rank(), world.size()));
      torch::nn::Linear linear(kWidth, kWidth);
      fully_shard(*linear, dp, {.mixed_precision = {.param_dtype = at::kBFloat16}});
      PipelineOptions options{world};
      options.ranks = {world.rank()};
      // Of a view, too.
      const StageModule module(
          [linear](at::Tensor x) mutable { return linear(x) + x.matmul(linear->weight.t()); },
          {linear.ptr()});
      ScheduleGPipe pipeline(
          PipelineStage(module, 0, 1, at::kCPU, with(trial)), 2,
          [](const at::Tensor& y, const at::Tensor&) { return y.to(at::kFloat).pow(2).mean(); }, options);
      const test::Batch batch = test::plain_batch(0, 4);
      const StepResult result = pipeline.step(batch.args, {}, batch.target);
      EXPECT_EQ(result.output->tensor().scalar_type(), at::kBFloat16);
      EXPECT_TRUE(is_dtensor(linear->weight));
      EXPECT_GT(full_tensor(linear->weight.grad()).abs().sum().item<double>(), 0);
    });
}

// Tensor-parallel stages whose ranks hold different rows: a shape that is new to one rank is known to the
// other.
TEST(DistributedTrial, TensorParallelRanksWhoseShapesDiffer) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(2, 30s, [&](comm::World& world) {
      const comm::MeshGroups tp(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), world.size()));
      struct RowsImpl : torch::nn::Module {
        explicit RowsImpl(const comm::MeshGroups& groups) : mesh(groups) {
          weight =
              register_parameter("weight", distribute_tensor(values({kWidth, kWidth}, 5), mesh, {Shard{0}}));
          calls = register_buffer("calls", at::zeros({}, at::kLong));
        }
        at::Tensor forward(const at::Tensor& x) {
          calls.add_(1);
          const at::Tensor whole = redistribute(weight, {Replicate{}});
          return x.matmul(to_local(whole, {.grad_placements = Placements{Partial{}}}));
        }
        comm::MeshGroups mesh;
        at::Tensor weight, calls;
      };
      auto module = std::make_shared<RowsImpl>(tp);
      PipelineOptions options{world};
      options.ranks = {world.rank()};
      ScheduleGPipe pipeline(PipelineStage(StageModule(module), 0, 1, at::kCPU, with(trial)), 2,
                             test::square_loss(), options);
      for (const int rows : {4, world.rank() == 0 ? 4 : 6, world.rank() == 0 ? 8 : 4}) {
        const test::Batch batch = test::plain_batch(world.rank(), rows);
        const StepResult result = pipeline.step(batch.args, {}, batch.target);
        EXPECT_TRUE(at::allclose(result.output->tensor(),
                                 batch.args[0].tensor().matmul(values({kWidth, kWidth}, 5)), 1e-5, 1e-6))
            << name_of(trial);
      }
      EXPECT_EQ(module->calls.item<int>(), 6);
      EXPECT_FALSE(is_fake(to_local(module->weight)));
    });
}

// Dropout of a distributed tensor, plain inputs of a parallelized module, a weight shared by two stages of a
// rank, a loss that reads values.
TEST(DistributedTrial, TensorParallelStagesOfOneRank) {
  for (const TrialRun trial : kTrials)
    for (const bool reads_values : {false, true}) {
      if (reads_values && trial == TrialRun::Fake) continue;
      comm::run_ranks(2, 30s, [&](comm::World& world) {
        const comm::MeshGroups tp(world, init_device_mesh("cpu", {2}, {"tp"}, world.rank(), world.size()));
        struct SharedImpl : torch::nn::Module {
          SharedImpl(int number, at::Tensor the_weight, const comm::MeshGroups& groups)
              : stage(number), mesh(groups), weight(register_parameter("weight", std::move(the_weight))) {
            factor = register_buffer("factor",
                                     distribute_tensor(at::linspace(0.5, 1.5, kWidth), mesh, {Replicate{}}));
          }
          at::Tensor forward(at::Tensor x) {
            if (stage == 0) x = from_local(x, mesh, {Replicate{}});
            x = torch::dropout(torch::linear(x, weight), 1e-12, true) * factor;
            return redistribute(x, {Replicate{}});
          }
          int stage;
          comm::MeshGroups mesh;
          at::Tensor weight, factor;
        };
        const at::Tensor whole = values({kWidth, kWidth}, 8),
                         weight = distribute_tensor(whole, tp, {Shard{0}}).set_requires_grad(true);
        std::vector<PipelineStage> stages;
        for (int stage = 0; stage < 3; ++stage)
          stages.emplace_back(StageModule(std::make_shared<SharedImpl>(stage, weight, tp)), stage, 3,
                              at::kCPU, with(trial));
        const auto loss = [&](const at::Tensor& y, const at::Tensor& target) {
          const at::Tensor value = (full_tensor(y) - target).pow(2).mean();
          EXPECT_TRUE(!reads_values || value.item<double>() >= 0);
          return value;
        };
        PipelineOptions options{world};
        options.ranks = {world.rank()};
        PipelineRuntime pipeline(
            stages,
            schedule::generate(ScheduleKind::Interleaved1F1B,
                               {.ranks = 1, .stages_per_rank = 3, .microbatches = 2, .group_size = {}}),
            loss, options);
        const test::Batch batch = test::plain_batch(0, 4);
        pipeline.step(batch.args, {}, batch.target);
        EXPECT_FALSE(is_fake(to_local(weight)));
        const at::Tensor alone = whole.clone().set_requires_grad(true);
        for (std::size_t m = 0; m < 2; ++m) {
          at::Tensor y = batch.args[0].tensor().chunk(2)[m];
          for (int stage = 0; stage < 3; ++stage)
            y = torch::linear(y, alone) * at::linspace(0.5, 1.5, kWidth);
          ((y - batch.target.tensor().chunk(2)[m]).pow(2).mean() / 2).backward();
        }
        EXPECT_TRUE(at::allclose(full_tensor(weight.grad()), alone.grad(), 1e-4, 1e-4)) << name_of(trial);
      });
    }
}

// A module that communicates by itself: its trial sends nothing, so no other rank needs to take part.
TEST(DistributedTrial, CollectivesOfModulesAreNotMadeInTrials) {
  for (const TrialRun trial : kTrials)
    comm::run_ranks(2, 30s, [&](comm::World& world) {
      PipelineOptions options{world};
      options.ranks = {world.rank()};
      const comm::Group group = world.group();
      const StageModule module(
          [&group](at::Tensor x, const Tree&) {
            at::Tensor all = at::empty({2 * x.size(0), x.size(1)}, x.options());
            group.all_gather(all, x.contiguous()).wait();
            at::Tensor sum = all.clone();
            group.all_reduce(sum).wait();
            return sum;
          },
          {});
      ScheduleGPipe pipeline(PipelineStage(module, 0, 1, at::kCPU, with(trial)), 2, {}, options);
      for (int step = 0; step < 3; ++step) {
        // Every step is new to rank 1, and only the first to rank 0.
        const StepResult result = pipeline.eval(Tree::tuple({values({4, kWidth}, world.rank())}),
                                                Tree::dict({{"step", world.rank() * step}}));
        const at::Tensor first = values({4, kWidth}, 0).chunk(2)[0],
                         second = values({4, kWidth}, 1).chunk(2)[0];
        EXPECT_TRUE(
            at::allclose(result.output->tensor().narrow(0, 0, 4), 2 * at::cat({first, second}), 1e-5, 1e-6))
            << name_of(trial);
      }
      EXPECT_EQ(pipeline.report().trials, world.rank() == 1 ? 3 : 1);
    });
}

}  // namespace distributed_trial_test
}  // namespace penstock
