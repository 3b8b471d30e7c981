// Training on shards is training in one process.
#include "penstock/shard/fully_shard.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/base/errors.h"
#include "penstock/dtensor/dtensor.h"
#include "penstock/shard/forward_scope.h"
#include "tests/has_text.h"
#include "tests/shard/sharded_training.h"
#include "tests/throws.h"

namespace penstock {
namespace {

using namespace std::chrono_literals;
using namespace penstock::test;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, Rank{world.rank()}, world.size())};
}

class Worlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, Worlds, testing::Values(1, 2, 3, 4));

TEST_P(Worlds, TrainLikeOneProcess) {
  alone();
  comm::run_ranks(GetParam(), 60s, [](comm::World& world) {
    Model model = same_model();
    shard_by_blocks(model, line(world));
    const Training ours = train_share(model, {.rank = world.rank(), .ranks = world.size()});
    expect_same_parameters(ours, alone());
  });
}

}  // namespace
}  // namespace penstock
