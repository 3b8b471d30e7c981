#include "penstock/device_mesh.h"

#include <gtest/gtest.h>

#include <thread>
#include <unordered_set>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace device_mesh_test {

using test::has_text;
using test::message_of;
using Numbers = std::vector<std::int64_t>;
using Ranks = std::vector<int>;
using Names = std::vector<std::string>;

DeviceMesh grid_2x4(int rank) { return init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, rank, 8); }
DeviceMesh grid_2x2x2(int rank) { return init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, rank, 8); }

TEST(DeviceMesh, Queries) {
  const DeviceMesh mesh = grid_2x4(5);
  EXPECT_EQ(mesh.device_type(), "cpu");
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.size(), 8);
  EXPECT_EQ(mesh.size(0), 2);
  EXPECT_EQ(mesh.size("tp"), 4);
  EXPECT_EQ(mesh.axis("tp"), 1);
  EXPECT_EQ(mesh.shape(), (Numbers{2, 4}));
  EXPECT_EQ(mesh.ranks(), (Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(mesh.this_rank(), 5);
  EXPECT_EQ(mesh.coordinate(), (Numbers{1, 1}));
  EXPECT_EQ(mesh.coordinate(3), (Numbers{0, 3}));
  EXPECT_EQ(mesh.coordinate(8), std::nullopt);
  EXPECT_EQ(mesh.axis_rank("dp"), 1);
  EXPECT_EQ(mesh.axis_rank(1, 3), 3);
  EXPECT_EQ(mesh.rank_list(0), (Ranks{1, 5}));
  EXPECT_EQ(mesh.rank_list(1, 2), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(mesh.rank_lists(0), (std::vector<Ranks>{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(mesh.rank_lists(1), (std::vector<Ranks>{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(mesh.to_string(), "DeviceMesh(cpu, dp=2 x tp=4, ranks [[0,1,2,3],[4,5,6,7]])");
}

TEST(DeviceMesh, SlicesContainTheOwnRank) {
  EXPECT_EQ(grid_2x4(5)["tp"].ranks(), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(grid_2x4(5)["dp"].ranks(), (Ranks{1, 5}));
  EXPECT_EQ(grid_2x4(5)["dp"].coordinate(), Numbers{1});
  EXPECT_EQ(grid_2x4(5)["dp"].coordinate(2), std::nullopt);
  EXPECT_EQ((grid_2x4(5)[{"dp", "tp"}]), grid_2x4(5));
  const DeviceMesh part = grid_2x2x2(3)[{"pp", "tp"}];
  EXPECT_EQ(part.to_string(), "DeviceMesh(cpu, pp=2 x tp=2, ranks [[2,3],[6,7]])");
  EXPECT_EQ(part["tp"].ranks(), (Ranks{2, 3}));
  EXPECT_EQ(part["pp"].ranks(), (Ranks{3, 7}));
  EXPECT_EQ(part.rank_lists(0), (std::vector<Ranks>{{2, 6}, {3, 7}}));
  EXPECT_EQ(part.root(), grid_2x2x2(3));
  EXPECT_TRUE(part.root().is_root());
  EXPECT_FALSE(part.is_root());
}

TEST(DeviceMesh, RanksInAnyOrder) {
  const DeviceMesh mesh("cuda", {2, 3}, {50, 40, 30, 20, 10, 0}, {"a", "b"}, 10);
  EXPECT_EQ(mesh.coordinate(), (Numbers{1, 1}));
  EXPECT_EQ(mesh["a"].ranks(), (Ranks{40, 10}));
  EXPECT_EQ(mesh["b"].ranks(), (Ranks{20, 10, 0}));
  EXPECT_EQ(mesh.as_rank(30)["b"].ranks(), (Ranks{50, 40, 30}));
  EXPECT_EQ(mesh["b"].as_rank(30).ranks(), (Ranks{50, 40, 30}));
}

TEST(DeviceMesh, Flatten) {
  const DeviceMesh mesh = grid_2x2x2(3);
  const DeviceMesh flat = mesh[{"pp", "dp"}].flatten();
  EXPECT_EQ(flat.to_string(), "DeviceMesh(cpu, pp_dp=4, ranks [1,3,5,7])");
  EXPECT_EQ(flat.coordinate(), Numbers{1});
  EXPECT_EQ(mesh["pp_dp"], flat);
  EXPECT_EQ(mesh.flatten({"pp", "dp"}), flat);
  EXPECT_EQ((mesh[{"pp_dp", "tp"}].to_string()),
            "DeviceMesh(cpu, pp_dp=4 x tp=2, ranks [[0,1],[2,3],[4,5],[6,7]])");
  EXPECT_EQ(mesh.flatten({"pp", "tp"}).ranks(), (Ranks{2, 3, 6, 7}));
  EXPECT_EQ(mesh["pp_tp"].coordinate(), Numbers{1});
  EXPECT_EQ(mesh.flatten({}, "all").ranks(), mesh.ranks());
  EXPECT_EQ(mesh["all"].names(), Names{"all"});
  EXPECT_EQ(mesh["tp"].flatten(), mesh["tp"]);
  EXPECT_EQ(mesh["tp"].flatten({}, "model").ranks(), mesh["tp"].ranks());
  // Copies of the mesh share flattened axes; a newly created mesh does not.
  EXPECT_EQ(DeviceMesh(mesh)["pp_dp"], flat);
  EXPECT_EQ(mesh.as_rank(0)["pp_dp"].ranks(), (Ranks{0, 2, 4, 6}));
  EXPECT_THROW(grid_2x2x2(3)["pp_dp"], ValueError);
}

TEST(DeviceMesh, FlattenedNamesThatClash) {
  const DeviceMesh mesh = grid_2x2x2(0);
  mesh.flatten({"pp", "dp"}, "outer");
  EXPECT_EQ(mesh.flatten({"pp", "dp"}, "outer"), mesh["outer"]);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         mesh.flatten({"dp", "tp"}, "outer");
                       }),
                       "not used for other flattened axes"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         mesh.flatten({"dp", "tp"}, "pp");
                       }),
                       "\"pp\", expected a name that no axis has"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh["tp"].flatten({}, "dp"); }), "\"dp\""));
}

// As in PyTorch, axes of size 1 have no order. PyTorch also accepts one of them twice, and then two axes
// share a name.
TEST(DeviceMesh, AxesOfOneRankHaveNoOrder) {
  const DeviceMesh mesh = init_device_mesh("cpu", {4, 1, 2}, {"dp", "cp", "tp"}, 3, 8);
  EXPECT_EQ(mesh.slice({"cp", "dp"}).to_string(), "DeviceMesh(cpu, cp=1 x dp=4, ranks [[1,3,5,7]])");
  EXPECT_EQ(mesh.slice({"dp", "tp", "cp"}).shape(), (Numbers{4, 2, 1}));
  EXPECT_EQ(mesh.slice({"dp", "tp", "cp"}).ranks(), mesh.ranks());
  EXPECT_THROW(mesh.slice({"tp", "cp", "dp"}), ValueError);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.slice({"cp", "cp"}); }), "\"cp\" twice"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.slice({"dp", "tp", "dp"}); }), "\"dp\" twice"));
}

TEST(DeviceMesh, SliceErrorsSayWhatToChange) {
  const DeviceMesh mesh = grid_2x2x2(0);
  mesh.flatten({"pp", "dp"});
  mesh.flatten({"pp", "tp"});
  const auto slice = [&](const Names& names) { return message_of<ValueError>([&] { mesh.slice(names); }); };
  EXPECT_TRUE(
      has_text(slice({"tq"}),
               "\"tq\", expected one of \"pp\", \"dp\", \"tp\", \"pp_dp\", \"pp_tp\"; did you mean \"tp\"?"));
  EXPECT_TRUE(has_text(slice({"tp", "dp"}), "not in the mesh's order"));
  EXPECT_TRUE(has_text(slice({"dp", "dp"}), "\"dp\" twice"));
  EXPECT_TRUE(has_text(slice({}), "no axes"));
  EXPECT_TRUE(has_text(slice({"pp_dp", "dp"}), "share an axis"));
  EXPECT_TRUE(has_text(slice({"pp_dp", "pp_tp"}), "share an axis"));
  EXPECT_TRUE(has_text(slice({"tp", "pp_dp"}), "not in the mesh's order"));
  EXPECT_TRUE(has_text(slice({"pp_tp", "dp"}), "no other axis between"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         mesh[{"pp", "dp"}]["pp_dp"];
                       }),
                       "one of \"pp\", \"dp\""));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.axis("nope"); }), "one of \"pp\", \"dp\", \"tp\""));
}

TEST(DeviceMesh, WithoutNames) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {}, 0, 4);
  EXPECT_EQ(mesh.to_string(), "DeviceMesh(cpu, 2 x 2, ranks [[0,1],[2,3]])");
  EXPECT_EQ(mesh.rank_list(0), (Ranks{0, 2}));
  EXPECT_EQ(mesh.unflatten(1, {1, 2}, {}).shape(), (Numbers{2, 1, 2}));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh["dp"]; }), "name the axes"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.flatten(); }), "name the axes"));
  EXPECT_THROW(mesh.unflatten(1, {1, 2}, {"a", "b"}), ValueError);
}

TEST(DeviceMesh, Unflatten) {
  const DeviceMesh world = init_device_mesh("cpu", {8}, {"world"}, 6, 8);
  const DeviceMesh mesh = world.unflatten("world", {2, 2, 2}, {"pp", "dp", "tp"});
  EXPECT_EQ(mesh.coordinate(), (Numbers{1, 1, 0}));
  EXPECT_EQ(mesh["dp"].ranks(), (Ranks{4, 6}));
  EXPECT_EQ(mesh.root(), world);
  EXPECT_EQ(mesh.unflatten("dp", {2, 1}, {"rep", "shard"}).names(), (Names{"pp", "rep", "shard", "tp"}));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         world.unflatten(0, {2, 3}, {"a", "b"});
                       }),
                       "a product of 8"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         world.unflatten(0, {2, 4}, {"a"});
                       }),
                       "1 names for 2 sizes"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         mesh.unflatten("dp", {2, 1}, {"pp", "x"});
                       }),
                       "\"pp\" twice"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.unflatten("cp", {2, 1}, {"a", "x"}); }), "\"cp\""));
  EXPECT_THROW(mesh.unflatten(3, {2}, {"a"}), ValueError);
  EXPECT_THROW(mesh.unflatten(0, {}, {}), ValueError);
}

TEST(DeviceMesh, Concatenate) {
  const DeviceMesh mesh = grid_2x2x2(5);
  EXPECT_EQ(DeviceMesh::concatenate({mesh["dp"], mesh["tp"]}), (mesh[{"dp", "tp"}]));
  const DeviceMesh turned = DeviceMesh::concatenate({mesh["tp"], mesh["pp"]});
  EXPECT_EQ(turned.to_string(), "DeviceMesh(cpu, tp=2 x pp=2, ranks [[0,4],[1,5]])");
  EXPECT_EQ(turned.coordinate(), (Numbers{1, 1}));
  EXPECT_EQ(DeviceMesh::concatenate({mesh.flatten({"pp", "tp"}), mesh["dp"]}).to_string(),
            "DeviceMesh(cpu, pp_tp=4 x dp=2, ranks [[0,2],[1,3],[4,6],[5,7]])");
  EXPECT_EQ(turned.flatten().ranks(), (Ranks{0, 4, 1, 5}));
  EXPECT_EQ(mesh["tp_pp"], turned.flatten());
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         DeviceMesh::concatenate({mesh["dp"], mesh[{"dp", "tp"}]});
                       }),
                       "do not overlap"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         DeviceMesh::concatenate({mesh["dp"], grid_2x4(5)["tp"].as_rank(4)});
                       }),
                       "as_rank"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         DeviceMesh::concatenate({mesh["dp"], init_device_mesh("cpu", {6}, {"x"}, 5, 8)});
                       }),
                       "same root"));
  EXPECT_THROW(DeviceMesh::concatenate({}), ValueError);
  const DeviceMesh again = mesh.unflatten("pp", {2}, {"dp2"});
  EXPECT_EQ(DeviceMesh::concatenate({again["dp2"], mesh["dp"]}).names(), (Names{"dp2", "dp"}));
}

TEST(DeviceMesh, MeshErrorsSayWhatToChange) {
  const auto init = [](const Numbers& shape, const Names& names, int rank, int world) {
    return message_of<ValueError>([&] { init_device_mesh("cpu", shape, names, rank, world); });
  };
  EXPECT_TRUE(has_text(init({2, 4}, {"dp", "tp"}, 0, 4),
                       "2 x 4, 8 ranks, expected at most the 4 ranks of the world"));
  EXPECT_TRUE(has_text(init({2, 2}, {"dp"}, 0, 4), "name every axis or none"));
  EXPECT_TRUE(has_text(init({2, 2}, {"dp", "dp"}, 0, 4), "\"dp\" twice"));
  EXPECT_TRUE(has_text(init({2, 2}, {"dp", ""}, 0, 4), "an empty one"));
  EXPECT_TRUE(has_text(init({2, 2}, {}, 4, 4), "got 4, expected 0 to 3"));
  EXPECT_TRUE(has_text(init({}, {}, 0, 4), "no axes"));
  EXPECT_TRUE(has_text(init({2, 0}, {}, 0, 4), "size 0"));
  const auto make = [](const Numbers& shape, const Ranks& ranks, const std::string& type = "cpu",
                       int own = 0) {
    return message_of<ValueError>([&] { DeviceMesh(type, shape, ranks, {}, own); });
  };
  EXPECT_TRUE(has_text(make({2, 2}, {0, 1, 2}), "3 ranks for the shape 2 x 2, expected 4 ranks"));
  EXPECT_TRUE(has_text(make({2}, {1, 1}), "rank 1 twice"));
  EXPECT_TRUE(has_text(make({2}, {1, -1}), "rank -1"));
  EXPECT_TRUE(has_text(make({2}, {0, 1}, "cuda:0"), "leave out the device index"));
  EXPECT_TRUE(has_text(make({2}, {0, 1}, ""), "cpu or cuda"));
  EXPECT_TRUE(has_text(make({2}, {0, 1}, "cpu", -1), "own rank"));
}

TEST(DeviceMesh, ARankOutside) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, 6, 8);
  EXPECT_EQ(mesh.ranks(), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(mesh.coordinate(), std::nullopt);
  EXPECT_FALSE(mesh.contains(6));
  EXPECT_EQ(mesh.as_rank(3)["dp"].ranks(), (Ranks{1, 3}));
  EXPECT_EQ(mesh.flatten().ranks(), mesh.ranks());
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh["tp"]; }),
                       "rank 6, expected one of the mesh's ranks 0, 1, 2, 3"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.axis_rank("tp"); }), "rank 6"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { mesh.rank_list(0); }), "rank 6"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { grid_2x4(0)["tp"].axis_rank(0, 4); }), "0, 1, 2, 3"));
}

TEST(DeviceMesh, EqualityAndHash) {
  EXPECT_EQ(grid_2x4(3), grid_2x4(3));
  EXPECT_EQ(grid_2x4(3)["tp"], grid_2x4(3)["tp"]);
  EXPECT_NE(grid_2x4(3), grid_2x4(4));
  EXPECT_NE(grid_2x4(3), grid_2x2x2(3));
  EXPECT_NE(grid_2x4(3), init_device_mesh("cuda", {2, 4}, {"dp", "tp"}, 3, 8));
  EXPECT_NE(grid_2x4(3), init_device_mesh("cpu", {2, 4}, {}, 3, 8));
  std::unordered_set<DeviceMesh> seen = {grid_2x4(3), grid_2x4(3), grid_2x4(3)["tp"], grid_2x4(4)};
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_TRUE(seen.contains(grid_2x4(3)["tp"]));
}

TEST(DeviceMesh, KeysFindTheMeshOfTheReceiver) {
  const DeviceMesh sender = grid_2x2x2(1), receiver = grid_2x2x2(7);
  EXPECT_EQ(sender["tp"].key(), receiver["tp"].key());
  EXPECT_EQ(receiver.find(sender["tp"].key()), receiver["tp"]);
  EXPECT_EQ(receiver["tp"].find(sender[{"pp", "dp"}].key()), (receiver[{"pp", "dp"}]));
  EXPECT_EQ(receiver.find(sender.flatten({"pp", "tp"}).key()).ranks(), (Ranks{2, 3, 6, 7}));
  EXPECT_EQ(receiver.find(MeshKey{{"dp"}, std::nullopt}), receiver["dp"]);
  EXPECT_EQ(sender["tp"].key().to_string(), "[tp] (2):(1)");
  std::unordered_set<MeshKey> keys = {sender["tp"].key(), sender["dp"].key(), MeshKey{{"tp"}, std::nullopt},
                                      receiver["dp"].key()};
  EXPECT_EQ(keys.size(), 3U);
  const auto find = [&](const MeshKey& key) { return message_of<ValueError>([&] { receiver.find(key); }); };
  EXPECT_TRUE(has_text(find({{"tp"}, MeshLayout({3})}), "derive the meshes of all stages from one mesh"));
  EXPECT_TRUE(has_text(find({{"tp"}, MeshLayout({2}, {8})}), "[tp] (2):(8)"));
  EXPECT_TRUE(has_text(find({{"tp", "dp"}, MeshLayout({2})}), "one per axis"));
  EXPECT_TRUE(has_text(find({{"cp"}, std::nullopt}), "\"cp\""));
  const MeshCallback callback = [&](const Names& names, const std::optional<MeshLayout>& layout) {
    return receiver.find({names, layout});
  };
  EXPECT_EQ(callback({"tp"}, MeshLayout({2})), receiver["tp"]);
}

TEST(DeviceMesh, LargeMeshesAreAbridgedInText) {
  EXPECT_EQ(init_device_mesh("cuda", {16, 8}, {"dp", "tp"}, 0, 128).to_string(),
            "DeviceMesh(cuda, dp=16 x tp=8, ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ... "
            "(128 in all))");
}

TEST(DeviceMesh, ThreadsMayFlattenAtOnce) {
  const DeviceMesh mesh = grid_2x2x2(0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; ++rank)
    threads.emplace_back([&mesh, rank] {
      const DeviceMesh own = mesh.as_rank(rank);
      for (int i = 0; i < 100; ++i) {
        const DeviceMesh flat = own.flatten({"pp", "dp"}, "outer" + std::to_string(i));
        EXPECT_EQ(own["outer" + std::to_string(i)], flat);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace device_mesh_test
}  // namespace penstock
