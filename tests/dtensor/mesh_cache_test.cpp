// Finding meshes by the keys of records.
#include "penstock/dtensor/tensor/mesh_cache.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_record.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::test {
namespace mesh_cache_test {

using namespace std::chrono_literals;

// Meshes need no communication, so a world without peers suffices.
comm::MeshGroups mesh_of_four(const std::vector<std::string>& names = {"dp", "tp"}) {
  return {comm::World::fake(1, 4), init_device_mesh("cpu", {2, 2}, names, 1, 4)};
}

TEST(MeshCache, AsksTheCallbackOnce) {
  const comm::MeshGroups root = mesh_of_four();
  const comm::MeshGroups tp = root.with_mesh(root.mesh()["tp"]);
  MeshCache cache;
  int asked = 0;
  const auto callback = [&](const MeshKey& key) -> std::optional<comm::MeshGroups> {
    ++asked;
    return root.with_mesh(root.mesh().find(key));
  };
  EXPECT_FALSE(cache.contains(tp.mesh().key()));
  EXPECT_EQ(cache.get(tp.mesh().key(), callback), tp);
  EXPECT_EQ(cache.get(tp.mesh().key(), callback), tp);
  EXPECT_EQ(cache.get(tp.mesh().key()), tp);
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(cache.contains(tp.mesh().key()));
  EXPECT_EQ(cache.size(), 1u);
  EXPECT_EQ(cache.get(root.mesh().key(), callback), root);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(cache.size(), 2u);
}

TEST(MeshCache, ErrorsSayWhatToDo) {
  const comm::MeshGroups root = mesh_of_four();
  MeshCache cache;
  const std::string nobody = message_of<PipeliningMetadataError>([&] { cache.get(root.mesh().key()); });
  EXPECT_TRUE(has_text(nobody, root.mesh().key().to_string()));
  EXPECT_TRUE(has_text(nobody, "pass a callback"));
  const std::string nothing = message_of<PipeliningMetadataError>(
      [&] { cache.get(root.mesh().key(), [](const MeshKey&) { return std::nullopt; }); });
  EXPECT_TRUE(has_text(nothing, "no mesh for [dp, tp]"));
  EXPECT_TRUE(has_text(nothing, "one universe"));
  const std::string other = message_of<PipeliningMetadataError>([&] {
    cache.get(root.mesh().key(), [&](const MeshKey&) { return root.with_mesh(root.mesh()["tp"]); });
  });
  EXPECT_TRUE(has_text(other, "got a mesh of [tp]"));
  EXPECT_THROW(cache.get(root.mesh().key(),
                         [](const MeshKey&) -> std::optional<comm::MeshGroups> { throw StateError("no"); }),
               StateError);
  EXPECT_THROW(cache.insert({{"pp"}, std::nullopt}, root), PipeliningMetadataError);
  EXPECT_EQ(cache.size(), 0u);
}

TEST(MeshCache, InsertReplaces) {
  const comm::MeshGroups first = mesh_of_four(), second = mesh_of_four();  // two worlds
  ASSERT_NE(first, second);
  MeshCache cache;
  cache.insert(first);
  EXPECT_EQ(cache.get(first.mesh().key()), first);
  cache.insert(second.mesh().key(), second);
  EXPECT_EQ(cache.get(first.mesh().key()), second);
  EXPECT_EQ(cache.size(), 1u);
  // Names alone are a separate key.
  cache.insert({{"dp", "tp"}, std::nullopt}, first);
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(cache.get({{"dp", "tp"}, std::nullopt}), first);
}

TEST(MeshCache, HarvestKeepsWhatIsThere) {
  const comm::MeshGroups first = mesh_of_four(), second = mesh_of_four();
  const comm::MeshGroups tp = second.with_mesh(second.mesh()["tp"]);
  const DistributeOptions equal{.source_axis_rank = {}};
  MeshCache cache;
  cache.insert(first);
  cache.harvest({at::Tensor(), at::ones({2}),
                 distribute_tensor(at::ones({4}), second, {Shard{0}, Replicate{}}, equal),
                 distribute_tensor(at::ones({4}), tp, {Shard{0}}, equal), at::Tensor()});
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(cache.get(first.mesh().key()), first);
  EXPECT_EQ(cache.get(tp.mesh().key()), tp);
  cache.harvest({});
  EXPECT_EQ(cache.size(), 2u);
}

// Both would be found under one key: a record would be ambiguous.
TEST(MeshCache, HarvestRefusesOtherRanksUnderOneKey) {
  const comm::MeshGroups first = mesh_of_four();
  const comm::MeshGroups second = first.with_mesh(DeviceMesh("cpu", {2, 2}, {0, 2, 1, 3}, {"dp", "tp"}, 1));
  ASSERT_EQ(first.mesh().key(), second.mesh().key());
  const DistributeOptions equal{.source_axis_rank = {}};
  MeshCache cache;
  const std::string message = message_of<PipeliningMetadataError>([&] {
    cache.harvest({distribute_tensor(at::ones({4}), first, {Shard{0}, Replicate{}}, equal),
                   distribute_tensor(at::ones({4}), second, {Shard{0}, Replicate{}}, equal)});
  });
  EXPECT_TRUE(has_text(message, "[[0,2],[1,3]]"));
  EXPECT_TRUE(has_text(message, "[[0,1],[2,3]]"));
}

// Stage 0 on ranks 0 and 1 tells stage 1 on ranks 2 and 3 what it will send; both have their own mesh called
// tp.
TEST(MeshCache, TheReceiverFindsItsOwnMesh) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const comm::MeshGroups root(world, init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), 4));
    const comm::MeshGroups tp = root.with_mesh(root.mesh()["tp"]);
    const DistributedRecord record = record_of_dtensor(distribute_tensor(at::ones({6, 2}), tp, {Shard{0}}));
    MeshCache cache;
    const comm::MeshGroups found = cache.get(
        record.mesh_key(), [&](const MeshKey& key) { return root.with_mesh(root.mesh().find(key)); });
    EXPECT_EQ(found, tp);
    EXPECT_EQ(mesh_of(make_dtensor_from_record(record, at::kCPU, found)).mesh().ranks(),
              world.rank() < 2 ? (std::vector<int>{0, 1}) : (std::vector<int>{2, 3}));
  });
}

}  // namespace mesh_cache_test
}  // namespace penstock::test
