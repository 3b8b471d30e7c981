// Groups along the axes of a mesh, over thread worlds: the order of requests must not matter.
#include "penstock/world.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include "penstock/comm/group/member_groups.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::comm {
namespace mesh_groups_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;
using Ranks = std::vector<int>;

DeviceMesh mesh_of(const World& world, const std::vector<std::int64_t>& shape,
                   const std::vector<std::string>& names) {
  return init_device_mesh("cpu", shape, names, world.rank(), world.size());
}

// Compares the sum of the ranks over a group, computed by communication, with the sum of its list.
void expect_sum(const Group& group) {
  at::Tensor sum = at::full({1}, group.ranks()[static_cast<std::size_t>(group.axis_rank())]);
  group.all_reduce(sum).wait();
  int expected = 0;
  for (const int rank : group.ranks()) expected += rank;
  EXPECT_EQ(sum.item<std::int64_t>(), expected) << group.name();
}

TEST(MeshGroups, AlongEveryAxis) {
  run_ranks(8, 60s, [](World& world) {
    const DeviceMesh mesh = mesh_of(world, {2, 2, 2}, {"pp", "dp", "tp"});
    const MeshGroups groups(world, mesh);
    for (int axis = 0; axis < 3; ++axis) {
      const Group group = groups.group(axis);
      EXPECT_EQ(group.ranks(), mesh.rank_list(axis));
      EXPECT_EQ(group.axis_rank(), mesh.axis_rank(axis));
      expect_sum(group);
    }
    EXPECT_EQ(groups.group("tp").name(), groups.group(2).name());
    mesh.flatten({"pp", "tp"});
    EXPECT_EQ(groups.group("pp_tp").ranks(), mesh["pp_tp"].ranks());
    expect_sum(groups.group("pp_tp"));
    expect_sum(groups.group_of(mesh[{"dp", "tp"}]));
    expect_sum(groups.group_of(DeviceMesh::concatenate({mesh["tp"], mesh["pp"]})));
  });
}

TEST(MeshGroups, EqualListsAreOneGroup) {
  run_ranks(4, 60s, [](World& world) {
    const DeviceMesh mesh = mesh_of(world, {2, 2}, {"dp", "tp"});
    const MeshGroups groups(world, mesh), again(world, mesh_of(world, {2, 1, 2}, {"a", "b", "c"}));
    EXPECT_EQ(groups.group("tp").name(), again.group("c").name());
    EXPECT_EQ(groups.group("dp").name(), again.group(0).name());
    EXPECT_EQ(groups.group_of(mesh).name(), world.group().name());
    EXPECT_EQ(world.group_of({0, 1, 2, 3}).name(), world.group().name());
    const Group alone = again.group("b");
    EXPECT_EQ(alone.ranks(), Ranks{world.rank()});
    expect_sum(alone);
    // The same ranks in another order are a different group.
    const Group turned = world.group_of({3, 2, 1, 0});
    EXPECT_EQ(turned.axis_rank(), 3 - world.rank());
    expect_sum(turned);
  });
}

// Every rank waits for a group whose other member waits for the next one, in a cycle.
TEST(MeshGroups, CrosswiseRequests) {
  run_ranks(4, 60s, [](World& world) {
    const MeshGroups groups(world, mesh_of(world, {2, 2}, {"dp", "tp"}));
    // 0: dp 0,2 | 2: tp 2,3 | 3: dp 1,3 | 1: tp 0,1
    const bool dp_first = world.rank() == 0 || world.rank() == 3;
    groups.group(dp_first ? "dp" : "tp");
    groups.group(dp_first ? "tp" : "dp");
    expect_sum(groups.group("dp"));
    expect_sum(groups.group("tp"));
  });
  run_ranks(3, 60s, [](World& world) {
    const int next = (world.rank() + 1) % 3, previous = (world.rank() + 2) % 3;
    const Group ahead = world.group_of({world.rank(), next});
    const Group behind = world.group_of({previous, world.rank()});
    at::Tensor sent = at::full({1}, world.rank()), got = at::zeros({1}, at::kLong);
    Work work = behind.irecv(got, previous);
    ahead.send(sent, next);
    work.wait();
    EXPECT_EQ(got.item<std::int64_t>(), previous);
  });
}

TEST(MeshGroups, AnyOrderOfRequests) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    run_ranks(8, 60s, [seed](World& world) {
      const DeviceMesh mesh = mesh_of(world, {2, 2, 2}, {"pp", "dp", "tp"});
      std::vector<DeviceMesh> parts = {mesh["pp"],         mesh["dp"],         mesh["tp"],
                                       mesh[{"pp", "dp"}], mesh[{"pp", "tp"}], mesh[{"dp", "tp"}]};
      std::vector<std::size_t> order = {0, 1, 2, 3, 4, 5};
      std::mt19937 random(seed * 100 + static_cast<unsigned>(world.rank()));
      std::shuffle(order.begin(), order.end(), random);
      const MeshGroups groups(world, mesh);
      for (const std::size_t i : order) groups.group_of(parts[i]);
      for (const DeviceMesh& part : parts) expect_sum(groups.group_of(part));
    });
  }
}

TEST(MeshGroups, OnlyMembersNeedToAsk) {
  run_ranks(4, 60s, [](World& world) {
    const MeshGroups groups(world, mesh_of(world, {2, 2}, {"pp", "tp"}));
    if (world.rank() < 2) expect_sum(groups.group("tp"));  // the first stage alone
    world.group().barrier().wait();
  });
}

TEST(MeshGroups, ThreadsOfOneRankMayAskAtOnce) {
  run_ranks(2, 60s, [](World& world) {
    const MeshGroups groups(world, mesh_of(world, {2, 1}, {"dp", "tp"}));
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&, i] { EXPECT_EQ(groups.group(i % 2).size(), i % 2 == 0 ? 2 : 1); });
    threads.emplace_back([&] { EXPECT_EQ(world.group_of({1, 0}).size(), 2); });
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(MeshGroups, AMemberThatNeverAsksIsNamed) {
  std::vector<std::string> messages(4);
  std::atomic<bool> told = false;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(4, 60s,
                         [&](World& world) {
                           if (world.rank() == 2) {  // busy with something else
                             while (!told && std::chrono::steady_clock::now() - begin < 30s)
                               std::this_thread::sleep_for(10ms);
                             return;
                           }
                           if (world.rank() == 1) {
                             world.group_of({1}, 3s);
                             return;
                           }
                           const std::string message = message_of<TimeoutError>([&] {
                             world.group_of({0, 2, 3}, 3s);
                           });
                           messages[static_cast<std::size_t>(world.rank())] = message;
                           told = true;
                           throw TimeoutError(message, {});
                         }),
               TimeoutError);
  for (const int rank : {0, 3}) {
    EXPECT_TRUE(has_text(messages[static_cast<std::size_t>(rank)], "rank 2 did not request it in time"));
    EXPECT_TRUE(has_text(messages[static_cast<std::size_t>(rank)], "ranks[0,2-3]"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST(MeshGroups, AMemberThatLeftIsNamedAtOnce) {
  std::string message;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(3, 60s,
                         [&](World& world) {
                           if (world.rank() == 2) return;
                           if (world.rank() == 1) return;
                           try {
                             world.group_of({2, 0});
                           } catch (const PeerLostError& error) {
                             message = error.what();
                             EXPECT_EQ(error.context().lost_rank, 2);
                             throw;
                           }
                         }),
               PeerLostError);
  EXPECT_TRUE(has_text(message, "rank 2 has left"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST(MeshGroups, AFailureElsewhereEndsTheWait) {
  std::string message;
  std::atomic<bool> told = false;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(3, 60s,
                         [&](World& world) {
                           if (world.rank() == 2) throw ConfigError("bad layer");
                           if (world.rank() == 1) {  // busy with something else
                             while (!told && std::chrono::steady_clock::now() - begin < 30s)
                               std::this_thread::sleep_for(10ms);
                             return;
                           }
                           message = message_of<PeerLostError>([&] { world.group_of({0, 1}); });
                           told = true;
                         }),
               ConfigError);
  EXPECT_TRUE(has_text(message, "rank 2 failed: bad layer"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

// A rank that opened a group on behalf of others ends without requesting it: the others are notified, and
// nobody hangs.
TEST(MeshGroups, AHelperThatLeaves) {
  std::string message;
  std::atomic<bool> asked = false, told = false;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(4, 60s,
                         [&](World& world) {
                           if (world.rank() == 3) {
                             asked = true;
                             message = message_of<PeerLostError>([&] { world.group_of({0, 2, 3}); });
                             told = true;
                             throw PeerLostError(message, {});
                           }
                           if (world.rank() == 2) {
                             while (!told && std::chrono::steady_clock::now() - begin < 30s)
                               std::this_thread::sleep_for(10ms);
                             return;
                           }
                           while (!asked) std::this_thread::sleep_for(1ms);
                           if (world.rank() == 1)
                             std::this_thread::sleep_for(300ms);  // rank 0 waits and reads its inbox
                           world.group_of({0, 1});
                         }),
               PeerLostError);
  EXPECT_TRUE(has_text(message, "rank 0 has left"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST(MeshGroups, BadRequestsSayWhatToChange) {
  run_ranks(2, 60s, [](World& world) {
    const auto ask = [&](const Ranks& ranks) {
      return message_of<ValueError>([&] { world.group_of(ranks); });
    };
    EXPECT_TRUE(has_text(ask({}), "at least one rank"));
    EXPECT_TRUE(has_text(ask({world.rank(), world.rank()}), "listed twice"));
    EXPECT_TRUE(has_text(ask({world.rank(), 2}), "outside the world of 2"));
    EXPECT_TRUE(has_text(ask({1 - world.rank()}), "call it on members only"));
    const DeviceMesh mesh = mesh_of(world, {2}, {"dp"});
    const MeshGroups groups(world, mesh);
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { groups.group("tp"); }), "\"dp\""));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { groups.group(1); }), "mesh axis"));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { MeshGroups(world, mesh.as_rank(1 - world.rank())); }),
                         "as_rank"));
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] { MeshGroups(world, init_device_mesh("cpu", {4}, {}, world.rank(), 4)); }),
        "start more ranks"));
    const MeshGroups half(world, init_device_mesh("cpu", {1}, {"dp"}, world.rank(), 2));
    if (world.rank() == 1) {
      EXPECT_TRUE(has_text(message_of<ValueError>([&] { half.group("dp"); }), "rank 1"));
      EXPECT_TRUE(has_text(message_of<ValueError>([&] { half.group(0); }), "rank 1"));
    }
    world.group().barrier().wait();  // the world is still usable
  });
}

TEST(MeshGroups, FakeWorlds) {
  const World world = World::fake(37, 64);
  const DeviceMesh mesh = mesh_of(world, {4, 4, 4}, {"pp", "dp", "tp"});
  const MeshGroups groups(world, mesh);
  EXPECT_EQ(groups.group("tp").ranks(), (Ranks{36, 37, 38, 39}));
  EXPECT_EQ(groups.group("dp").ranks(), (Ranks{33, 37, 41, 45}));
  EXPECT_EQ(groups.group("pp").axis_rank(), 2);
  EXPECT_EQ(groups.group("tp").name(), groups.group(2).name());
  EXPECT_EQ(groups.group_of(mesh).size(), 64);
  at::Tensor tensor = at::ones({4});
  groups.group("dp").all_reduce(tensor).wait();
  EXPECT_THROW(world.group_of({1, 2}), ValueError);
}

TEST(MeshGroups, MeshOfAWorld) {
  run_ranks(4, 60s, [](World& world) {
    const MeshGroups groups = world.mesh("cpu", {{"dp", 2}, {"tp", 2}});
    EXPECT_EQ(groups, MeshGroups(world, mesh_of(world, {2, 2}, {"dp", "tp"})));
    EXPECT_EQ(groups.group("tp").ranks(), (world.rank() < 2 ? Ranks{0, 1} : Ranks{2, 3}));
    EXPECT_EQ(groups.group("dp").ranks(), (world.rank() % 2 == 0 ? Ranks{0, 2} : Ranks{1, 3}));
    expect_sum(groups.group("tp"));
    expect_sum(groups.group("dp"));
    EXPECT_EQ(world.mesh("cpu", {{"dp", world.size()}}).group("dp").name(), world.group().name());
  });
  const World world = World::fake(1, 4);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         world.mesh("cpu", {{"dp", 4}, {"tp", 2}});
                       }),
                       "4 x 2, 8 ranks"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                         world.mesh("cpu", {{"dp", 1}, {"tp", 2}});
                       }),
                       "all 4 ranks of the world"));
  EXPECT_THROW(world.mesh("cpu", {{"dp", 2}, {"dp", 2}}), ValueError);
}

TEST(MeshGroups, NamesOfLists) {
  EXPECT_EQ(rank_list_text({3}), "3");
  EXPECT_EQ(rank_list_text({0, 1}), "0-1");
  EXPECT_EQ(rank_list_text({0, 4}), "0,4");
  EXPECT_EQ(rank_list_text({0, 2, 4, 6}), "0-6:2");
  EXPECT_EQ(rank_list_text({0, 1, 4, 5}), "0-1,4-5");
  EXPECT_EQ(rank_list_text({3, 2, 1, 0}), "3,2,1,0");
  EXPECT_EQ(rank_list_text({0, 1, 3, 5, 7}), "0-1,3-7:2");
  EXPECT_EQ(rank_list_text({0, 3, 4}), "0,3-4");
}

// Ranks do not agree on when they make a trial run, so it cannot rely on the other members of a group: here
// the other member has ended.
TEST(MeshGroups, ATrialRunOpensNoGroup) {
  std::atomic<int> ended{0};
  run_ranks(4, 20s, [&](World& world) {
    if (world.rank() != 0) {
      ++ended;
      return;
    }
    while (ended < 3) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(100ms);
    const MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, 0, 4));
    StepContext context;
    context.trial = true;
    const StepGuard guard(context);
    const Group group = mesh.group(1);  // not that of the world, which is open
    EXPECT_EQ(group.size(), 2);
    at::Tensor all = at::ones({2});
    group.all_gather(all, at::ones({1})).wait();
    EXPECT_TRUE(at::equal(all, at::zeros({2})));
  });
}

// What a trial run used is not kept for later.
TEST(MeshGroups, AGroupAskedForInATrialRunIsOpenedByItsFirstUse) {
  run_ranks(4, 20s, [](World& world) {
    const MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"pp", "tp"}, world.rank(), 4));
    {
      StepContext context;
      context.trial = true;
      const StepGuard guard(context);
      mesh.group(1);
    }
    at::Tensor sum = at::ones({1});
    mesh.group(1).all_reduce(sum, ReduceOp::Sum).wait();
    EXPECT_EQ(sum.item<float>(), 2);
  });
}

}  // namespace mesh_groups_test
}  // namespace penstock::comm
