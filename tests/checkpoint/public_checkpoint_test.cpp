// The public functions for checkpoints: saved under one layout, loaded under another.
#include "penstock/checkpoint.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "penstock/checkpoint/files/folder.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/checkpoint/file_ranks.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::checkpoint {
namespace public_checkpoint_test {

using namespace std::chrono_literals;
using penstock::test::has_text;
using penstock::test::message_of;
using test::TemporaryFolder;

at::Tensor weight() { return at::arange(22, at::kFloat).reshape({11, 2}); }

// One tensor sharded over the ranks, one whole on every rank, and one of the optimizer.
CheckpointData sharded(comm::World& world, double scale = 1) {
  const comm::MeshGroups mesh(world,
                              init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size()));
  const at::Tensor parts =
      distribute_tensor(weight() * scale, mesh, {Shard{0}}, {.source_axis_rank = std::nullopt});
  return {.model = {{"weight", parts}, {"bias", at::full({3}, scale)}},
          .optimizer = {{"weight.m", at::full({2}, 5 * scale)}},
          .state_json = R"({"batches": 7})"};
}

CheckpointData zeros() {
  return {.model = {{"weight", at::zeros({11, 2})}, {"bias", at::zeros({3})}},
          .optimizer = {{"weight.m", at::zeros({2})}}};
}

TEST(PublicCheckpoint, SavedShardedLoadedWhole) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    save_checkpoint(world, folder.path(), 120, sharded(world));
    const CheckpointData data = zeros();
    const auto loaded = load_checkpoint(world, folder.path(), data);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->step, 120);
    EXPECT_EQ(loaded->path, folder.path() / "step-00000120");
    EXPECT_EQ(loaded->state_json, R"({"batches": 7})");
    EXPECT_TRUE(loaded->skipped.empty());
    EXPECT_TRUE(at::equal(data.model[0].second, weight()));
    EXPECT_EQ(data.model[1].second.sum().item<double>(), 3);
    EXPECT_EQ(data.optimizer[0].second.sum().item<double>(), 10);
  });
}

TEST(PublicCheckpoint, ParametersAreLoadedInPlace) {
  const TemporaryFolder folder;
  const auto world = comm::World::connect({});
  torch::nn::Linear saved(4, 3), loaded(4, 3);
  const auto data_of = [](torch::nn::Linear& module) {
    CheckpointData data;
    for (const auto& item : module->named_parameters()) data.model.emplace_back(item.key(), item.value());
    return data;
  };
  save_checkpoint(world, folder.path(), 0, data_of(saved));
  ASSERT_TRUE(load_checkpoint(world, folder.path(), data_of(loaded)));
  EXPECT_TRUE(at::equal(loaded->weight, saved->weight));
  EXPECT_TRUE(loaded->weight.requires_grad() && loaded->weight.is_leaf());
}

TEST(PublicCheckpoint, AMissingOrEmptyFolderHasNone) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    const CheckpointData data = zeros();
    EXPECT_FALSE(load_checkpoint(world, folder.path() / "nowhere", data));
    EXPECT_FALSE(load_checkpoint(world, folder.path(), data));
    EXPECT_EQ(data.model[1].second.sum().item<double>(), 0);
  });
}

TEST(PublicCheckpoint, FallsBackFromADamagedOneOnlyIfAllowed) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    save_checkpoint(world, folder.path(), 1, sharded(world, 1));
    save_checkpoint(world, folder.path(), 2, sharded(world, 2));
    const auto file = folder.path() / "step-00000002" / "model.safetensors";
    if (world.rank() == 0) test::flip(file, std::filesystem::file_size(file) - 1, 1);
    world.group().barrier().wait();
    const CheckpointData data = zeros();
    EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { load_checkpoint(world, folder.path(), data); }),
                         "step-00000002"));
    EXPECT_EQ(data.model[0].second.abs().sum().item<double>(), 0) << "nothing was loaded";
    const auto loaded = load_checkpoint(world, folder.path(), data, {.allow_fallback = true});
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->step, 1);
    ASSERT_EQ(loaded->skipped.size(), 1u);
    EXPECT_TRUE(has_text(loaded->skipped[0], "step-00000002"));
    EXPECT_TRUE(at::equal(data.model[0].second, weight()));
  });
}

TEST(PublicCheckpoint, DifferencesAreErrorsUnlessAllowed) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    save_checkpoint(world, folder.path(), 1, sharded(world));
    const CheckpointData data{
        .model = {{"weight", at::zeros({11, 2}, at::kDouble)}, {"scale", at::ones({1})}}, .optimizer = {}};
    const std::string error =
        message_of<CheckpointError>([&] { load_checkpoint(world, folder.path(), data); });
    EXPECT_TRUE(has_text(error, "scale: not in the checkpoint"));
    const auto loaded = load_checkpoint(world, folder.path(), data,
                                        {.allow_cast = true, .allow_missing = true, .allow_extra = true});
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->missing, std::vector<std::string>{"scale"});
    EXPECT_EQ(loaded->extra, (std::vector<std::string>{"bias", "weight.m"}));
    EXPECT_EQ(loaded->cast, std::vector<std::string>{"weight: F32 in the checkpoint, F64 here"});
    EXPECT_TRUE(at::equal(data.model[0].second, weight().to(at::kDouble)));
    EXPECT_EQ(data.model[1].second.item<double>(), 1);
  });
}

TEST(AsyncCheckpointer, SavesTheValuesOfTheCallAndKeepsTheLast) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    AsyncCheckpointer checkpointer(world, folder.path(), {.keep_last = 2});
    EXPECT_EQ(checkpointer.folder(), folder.path());
    const CheckpointData data{.model = {{"w", at::ones({3})}}, .optimizer = {}};
    for (const std::int64_t step : {1, 2, 3}) {
      checkpointer.save(step, data);
      data.model[0].second.add_(1);
    }
    checkpointer.wait();
    const std::vector<SaveOutcome> outcomes = checkpointer.ended();
    ASSERT_EQ(outcomes.size(), 3u);
    EXPECT_EQ(outcomes.back().step, 3);
    EXPECT_EQ(outcomes.back().error, "");
    world.group().barrier().wait();  // rank 0 deletes the old ones
    EXPECT_EQ(find_checkpoints(folder.path()).size(), 2u);
    const CheckpointData read{.model = {{"w", at::zeros({3})}}, .optimizer = {}};
    EXPECT_EQ(load_checkpoint(world, folder.path(), read)->step, 3);
    EXPECT_EQ(read.model[0].second.sum().item<double>(), 9);
  });
}

TEST(AsyncCheckpointer, ATensorThatCannotBeSavedIsAnErrorOnEveryRank) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    AsyncCheckpointer checkpointer(world, folder.path());
    const CheckpointData bad{.model = {{"w", world.rank() == 1 ? at::Tensor() : at::ones({2})}},
                             .optimizer = {}};
    const std::string error = message_of<CheckpointError>([&] { checkpointer.save(1, bad); });
    EXPECT_TRUE(has_text(error, "rank 1"));
    EXPECT_TRUE(has_text(error, "an undefined tensor"));
    checkpointer.save(1, {.model = {{"w", at::ones({2})}}, .optimizer = {}});
    checkpointer.wait();
    EXPECT_EQ(find_checkpoints(folder.path()).size(), 1u);
  });
}

}  // namespace public_checkpoint_test
}  // namespace penstock::checkpoint
