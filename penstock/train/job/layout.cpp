#include "penstock/train/job/layout.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/device_mesh.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

DeviceMesh mesh_of(const comm::World& world, const LayoutConfig& config) {
  const std::int64_t needed = config.pp * config.dp * config.tp;
  if (needed != world.size())
    throw ConfigError(
        describe("ranks", std::to_string(world.size()),
                 fmt::format("pp * dp * tp = {} * {} * {} = {}", config.pp, config.dp, config.tp, needed),
                 "start that many ranks, or change the layout"));
  return init_device_mesh("cpu", {config.pp, config.dp / config.shard, config.shard, config.tp},
                          {"pp", "replicas", "shard", "tp"}, world.rank(), world.size());
}

}  // namespace

RankLayout::RankLayout(const comm::World& world, const LayoutConfig& config)
    : world_(world), mesh_(world, mesh_of(world, config)) {
  for (std::size_t axis = 0; axis < 4; ++axis) {
    size_[axis] = static_cast<int>(mesh_.shape()[axis]);
    place_[axis] = static_cast<int>(mesh_.coordinate()[axis]);
  }
}

comm::MeshGroups RankLayout::tensor_mesh() const { return mesh_.with_mesh(mesh_.mesh()["tp"]); }

comm::MeshGroups RankLayout::shard_mesh() const {
  if (size_[1] == 1) return mesh_.with_mesh(mesh_.mesh()["shard"]);
  return mesh_.with_mesh(mesh_.mesh()[{"replicas", "shard"}]);
}

std::vector<comm::Group> RankLayout::data_parallel_groups() const {
  std::vector<comm::Group> groups;
  if (size_[1] > 1) groups.push_back(mesh_.group("replicas"));
  if (size_[2] > 1) groups.push_back(mesh_.group("shard"));
  return groups;
}

std::vector<int> RankLayout::pipeline_ranks() const { return mesh_.mesh().rank_list(0); }

}  // namespace penstock::train
