#include "penstock/train/job/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/device_mesh.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"

namespace penstock::train {

namespace {

DeviceMesh mesh_of_ranks(const comm::World& world, const LayoutConfig& config) {
  const std::int64_t needed = config.pp * config.dp * config.tp;
  if (needed != world.size())
    throw ConfigError(
        describe("ranks", std::to_string(world.size()),
                 fmt::format("pp * dp * tp = {} * {} * {} = {}", config.pp, config.dp, config.tp, needed),
                 "start that many ranks, or change the layout"));
  const bool sharded = config.shard > 1;
  return init_device_mesh("cpu",
                          {config.pp, config.dp / (sharded ? config.shard : config.ep),
                           sharded ? config.shard / config.ep : 1, config.ep, config.tp},
                          {"pp", "replicas", "shard", "ep", "tp"}, world.rank(), world.size());
}

}  // namespace

bool is_divided_expert(const at::Tensor& parameter) {
  if (!is_dtensor(parameter)) return false;
  const std::vector<std::string>& names = penstock::mesh_of(parameter).mesh().names();
  return std::find(names.begin(), names.end(), "ep") != names.end();
}

RankLayout::RankLayout(const comm::World& world, const LayoutConfig& config)
    : world_(world), mesh_(world, mesh_of_ranks(world, config)), sharded_(config.shard > 1) {
  for (std::size_t axis = 0; axis < 5; ++axis) {
    size_[axis] = static_cast<int>(mesh_.shape()[axis]);
    place_[axis] = static_cast<int>(mesh_.coordinate()[axis]);
  }
}

std::optional<comm::MeshGroups> RankLayout::split_mesh() const {
  std::vector<std::string> axes;
  if (ep_size() > 1) axes.push_back("ep");
  if (tp_size() > 1) axes.push_back("tp");
  if (axes.empty()) return std::nullopt;
  return mesh_.with_mesh(mesh_.mesh().slice(axes));
}

comm::MeshGroups RankLayout::shard_mesh() const {
  const std::string shard = ep_size() == 1 ? "shard" : "shard_ep";
  if (ep_size() > 1) mesh_.mesh().flatten({"shard", "ep"}, shard);
  if (size_[1] == 1) return mesh_.with_mesh(mesh_.mesh()[shard]);
  return mesh_.with_mesh(mesh_.mesh().slice({"replicas", shard}));
}

comm::MeshGroups RankLayout::expert_shard_mesh() const {
  if (size_[1] == 1) return mesh_.with_mesh(mesh_.mesh()["shard"]);
  return mesh_.with_mesh(mesh_.mesh()[{"replicas", "shard"}]);
}

comm::Group RankLayout::copies() const {
  return mesh_.group_of(mesh_.mesh().flatten({"replicas", "shard", "ep"}, "dp"));
}

int RankLayout::copy_of(const at::Tensor& parameter) const {
  return sharded_ || is_divided_expert(parameter) ? place_[1] : dp();
}

std::vector<int> RankLayout::pipeline_ranks() const { return mesh_.mesh().rank_list(0); }

}  // namespace penstock::train
