// The cost of a step besides its computation: bytes sent, memory allocated, parameters gathered.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/comm/record/recorder.h"
#include "penstock/dtensor.h"
#include "penstock/fully_shard.h"
#include "penstock/shard_options.h"
#include "penstock/tensor_parallel.h"

namespace penstock {
namespace shard_traffic_test {

using namespace std::chrono_literals;
namespace nn = torch::nn;

// Of a layer, divisible by 4.
constexpr std::int64_t kWidth = 64, kLayers = 4, kParameters = kWidth * kWidth + kWidth;

nn::Sequential layers() {
  nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) model->push_back(nn::Linear(kWidth, kWidth));
  return model;
}

comm::MeshGroups mesh_of(comm::World& world, int replicas) {
  if (replicas == 1)
    return {world, init_device_mesh("cpu", {world.size()}, {"shards"}, world.rank(), world.size())};
  return {world, init_device_mesh("cpu", {replicas, world.size() / replicas}, {"replicas", "shards"},
                                  world.rank(), world.size())};
}

// Bytes that one rank passes to the collectives of a step, by kind: the output of a gather, the input of a
// reduction.
struct Traffic {
  std::uint64_t gathered = 0, scattered = 0, reduced = 0, others = 0;
};

struct Layout {
  std::string name;
  int ranks;
  int replicas = 1;
  bool replicate = false;
  ShardOptions options = {};
};

Traffic traffic_of_a_step(const Layout& layout) {
  Traffic traffic;
  comm::run_ranks(layout.ranks, 60s, [&](comm::World& world) {
    nn::Sequential model = layers();
    const comm::MeshGroups mesh = mesh_of(world, layout.replicas);
    for (const auto& child : model->children())
      layout.replicate ? replicate(*child, mesh, layout.options) : fully_shard(*child, mesh, layout.options);
    layout.replicate ? replicate(*model, mesh, layout.options) : fully_shard(*model, mesh, layout.options);
    const auto step = [&] { model->forward(at::ones({2, kWidth})).sum().backward(); };
    step();  // ranks agree on the parameters
    const auto meet = [&] { world.group().barrier().wait(); };
    meet();
    if (world.rank() == 0) comm::Recorder::global().reset_totals();
    meet();
    step();
    meet();
    if (world.rank() == 0)
      for (const auto& [kind, totals] : comm::Recorder::global().totals()) {
        const std::uint64_t bytes = totals.bytes / static_cast<std::uint64_t>(layout.ranks);
        (kind == "all_gather"       ? traffic.gathered
         : kind == "reduce_scatter" ? traffic.scattered
         : kind == "all_reduce"     ? traffic.reduced
                                    : traffic.others) += bytes;
      }
    meet();
  });
  return traffic;
}

constexpr std::uint64_t kWhole = kParameters * 4;  // bytes of a layer in float32
// One number for each of the two parameters accompanies a gradient.
constexpr std::uint64_t kMark = 2 * 4;

// The last layer of forward is the first of backward and stays gathered: every other is gathered twice.
constexpr std::uint64_t kGathers = 2 * kLayers - 1;

TEST(Traffic, OfShardsIsEachParameterOnce) {
  for (const int ranks : {2, 4}) {
    const Traffic traffic = traffic_of_a_step({.name = "shards", .ranks = ranks});
    EXPECT_EQ(traffic.gathered, kGathers * kWhole);
    EXPECT_EQ(traffic.scattered, kLayers * (kWhole + static_cast<std::uint64_t>(ranks) * kMark));
    EXPECT_EQ(traffic.reduced, 0u);
  }
}

TEST(Traffic, KeptParametersAreGatheredOnce) {
  const Traffic traffic =
      traffic_of_a_step({.name = "kept", .ranks = 2, .options = {.reshard_after_forward = false}});
  EXPECT_EQ(traffic.gathered, kLayers * kWhole);
}

// Only the reduced shards are sent over replicas, not the whole gradients.
TEST(Traffic, OfReplicasIsAShard) {
  const Traffic traffic = traffic_of_a_step({.name = "two by two", .ranks = 4, .replicas = 2});
  EXPECT_EQ(traffic.gathered, kGathers * kWhole);
  EXPECT_EQ(traffic.scattered, kLayers * (kWhole + 2 * kMark));
  EXPECT_EQ(traffic.reduced, kLayers * (kWhole / 2 + kMark));
}

TEST(Traffic, OfReplicateIsTheGradientsAlone) {
  const Traffic traffic = traffic_of_a_step({.name = "replicate", .ranks = 3, .replicate = true});
  EXPECT_EQ(traffic.gathered, 0u);
  EXPECT_EQ(traffic.scattered, 0u);
  EXPECT_EQ(traffic.reduced, kLayers * (kWhole + kMark));
}

// If a slice is kept, backward gathers the same bytes, but among two neighbours: each rank sends half of them
// to one other rank instead of a quarter to three.
TEST(Traffic, OfASliceStaysAmongNeighbours) {
  const Traffic traffic =
      traffic_of_a_step({.name = "slice", .ranks = 4, .options = {.reshard_after_forward = ReshardTo{2}}});
  EXPECT_EQ(traffic.scattered, kLayers * (kWhole + 4 * kMark));
  // Gathered memory is aligned, so that slices are equal.
  EXPECT_GE(traffic.gathered, kGathers * kWhole);
  EXPECT_LE(traffic.gathered, kGathers * (kWhole + 2 * 64));
}

TEST(Traffic, OfLowPrecisionIsHalfAndOfInt8AQuarter) {
  const Traffic half = traffic_of_a_step(
      {.name = "bf16", .ranks = 2, .options = {.mixed_precision = {.param_dtype = at::kBFloat16}}});
  EXPECT_EQ(half.gathered, kGathers * kWhole / 2);
  EXPECT_EQ(half.scattered, kLayers * (kWhole + 2 * kMark) / 2);
  const Traffic mixed = traffic_of_a_step(
      {.name = "bf16, reduced in float32",
       .ranks = 2,
       .options = {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}});
  EXPECT_EQ(mixed.gathered, kGathers * kWhole / 2);
  EXPECT_EQ(mixed.scattered, kLayers * (kWhole + 2 * kMark));
  const auto int8 = int8_gather();
  const Traffic eighth = traffic_of_a_step(
      {.name = "int8", .ranks = 2, .options = {.extension = [int8](const std::string&, const at::Tensor& p) {
                                     return p.dim() == 2 ? int8 : nullptr;
                                   }}});
  // One float32 scale for 128 values; vectors are sent unchanged.
  EXPECT_EQ(eighth.gathered, kGathers * (kWidth * kWidth + kWidth * kWidth / 128 * 4 + kWidth * 4));
}

// Gradients of a parameter that is also distributed over the data-parallel axis are terms of a sum there.
// They stay so until the reduction: nothing of their size is summed before it.
TEST(Traffic, OfTermsOfASumIsTheReductionAlone) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 1}, {"dp", "tp"}, world.rank(), 2));
    nn::Linear layer(nn::LinearOptions(kWidth, kWidth).bias(false));
    distribute_parameter(layer->weight, mesh, {Replicate{}, Replicate{}});
    fully_shard(*layer, mesh, {.shard_axes = {"dp"}});
    const at::Tensor x = distribute_tensor(at::ones({8, kWidth}), mesh, {Shard{0}, Replicate{}});
    const auto step = [&] { layer(x).sum().backward(); };
    step();
    const auto meet = [&] { world.group().barrier().wait(); };
    meet();
    if (world.rank() == 0) comm::Recorder::global().reset_totals();
    meet();
    layer->weight.mutable_grad().reset();
    step();
    meet();
    const auto totals = comm::Recorder::global().totals();
    const std::uint64_t whole = kWidth * kWidth * 4;
    EXPECT_EQ(totals.at("reduce_scatter").bytes / 2, whole + 2 * 4) << "with one mark for each rank";
    for (const auto& [kind, total] : totals)
      if (kind != "reduce_scatter" && kind != "all_gather") {
        EXPECT_LT(total.bytes / 2, whole / 8) << kind;
      }
    meet();
    EXPECT_TRUE(at::allclose(full_tensor(layer->weight.grad()), at::full({kWidth, kWidth}, 8.0)))
        << "the gradient of the whole batch";
  });
}

// Accumulating whole gradients needs no reduction, and kept parameters no gather.
TEST(Traffic, OfAccumulationIsThatOfOneBackward) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    nn::Sequential model = layers();
    const comm::MeshGroups mesh = mesh_of(world, 1);
    for (const auto& child : model->children()) fully_shard(*child, mesh);
    const auto root = fully_shard(*model, mesh);
    model->forward(at::ones({2, kWidth})).sum().backward();
    const auto meet = [&] { world.group().barrier().wait(); };
    meet();
    if (world.rank() == 0) comm::Recorder::global().reset_totals();
    meet();
    root->set_reshard_after_forward(false);
    for (int i = 0; i < 4; ++i) {
      root->set_requires_gradient_sync(i == 3);
      root->set_reshard_after_backward(i == 3);
      model->forward(at::ones({2, kWidth})).sum().backward();
    }
    meet();
    const auto totals = comm::Recorder::global().totals();
    EXPECT_EQ(totals.at("all_gather").bytes / 2, kLayers * kWhole);
    EXPECT_EQ(totals.at("reduce_scatter").bytes / 2, kLayers * (kWhole + 2 * kMark));
    meet();
  });
}

// ---- memory ----

// For every layout: after two steps the buffers of gathers and reductions come from the pool, and at most two
// groups are gathered at once.
TEST(StepMemory, NothingIsAllocatedAfterTheSecondStep) {
  const auto int8 = int8_gather();
  const std::vector<Layout> layouts{
      {.name = "shards", .ranks = 2},
      {.name = "three shards", .ranks = 3},
      {.name = "replicas of shards", .ranks = 4, .replicas = 2},
      {.name = "replicate", .ranks = 2, .replicate = true},
      {.name = "a slice kept", .ranks = 4, .options = {.reshard_after_forward = ReshardTo{2}}},
      {.name = "mixed",
       .ranks = 2,
       .options = {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
      {.name = "offloaded", .ranks = 2, .options = {.offload = {.to_cpu = true}}},
      {.name = "int8",
       .ranks = 2,
       .options = {.extension = [int8](const std::string&,
                                       const at::Tensor& p) { return p.dim() == 2 ? int8 : nullptr; }}},
  };
  for (const Layout& layout : layouts)
    comm::run_ranks(layout.ranks, 60s, [&](comm::World& world) {
      SCOPED_TRACE(layout.name);
      nn::Sequential model = layers();
      const comm::MeshGroups mesh = mesh_of(world, layout.replicas);
      for (const auto& child : model->children())
        layout.replicate ? replicate(*child, mesh, layout.options)
                         : fully_shard(*child, mesh, layout.options);
      const auto root = layout.replicate ? replicate(*model, mesh, layout.options)
                                         : fully_shard(*model, mesh, layout.options);
      std::size_t allocations = 0;
      for (int step = 0; step < 5; ++step) {
        root->reset_peak();
        model->forward(at::ones({2, kWidth})).sum().backward();
        for (const auto& p : model->parameters()) p.mutable_grad().reset();
        if (step == 1) allocations = root->pool_allocations();
        if (step > 1) {
          EXPECT_EQ(root->pool_allocations(), allocations) << "step " << step;
        }
        const std::int64_t slices =
            layout.options.reshard_after_forward ? kLayers * static_cast<std::int64_t>(kWhole) / 2 + 4096 : 0;
        EXPECT_LE(root->peak_gathered_bytes(), 2 * static_cast<std::int64_t>(kWhole) + 4096 + slices)
            << "step " << step;
      }
      EXPECT_GT(layout.replicate ? 1u : allocations, 0u);
    });
}

// The times of a step: parts of it, none of them empty, and nothing of an earlier step.
TEST(StepTimes, OfGathersReductionsAndCopies) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    nn::Sequential model = layers();
    const comm::MeshGroups mesh = mesh_of(world, 1);
    for (const auto& child : model->children()) fully_shard(*child, mesh);
    const auto root = fully_shard(*model, mesh);
    const auto total = [&] {
      const ShardTimes times = root->times();
      return times.gather + times.reduce + times.copy;
    };
    EXPECT_EQ(total().count(), 0);
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor loss = model->forward(at::ones({2, kWidth})).sum();
    EXPECT_GT(root->times().gather.count(), 0);
    EXPECT_GT(root->times().copy.count(), 0);
    EXPECT_EQ(root->times().reduce.count(), 0);
    loss.backward();
    EXPECT_GT(root->times().reduce.count(), 0);
    EXPECT_LE(total(), std::chrono::steady_clock::now() - begin);
    root->reset_times();
    EXPECT_EQ(total().count(), 0);
  });
}

}  // namespace shard_traffic_test
}  // namespace penstock
