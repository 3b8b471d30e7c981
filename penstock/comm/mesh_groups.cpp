#include "penstock/comm/mesh_groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/errors.h"

namespace penstock::comm {

namespace {

void check(const World& world, const DeviceMesh& mesh) {
  if (mesh.this_rank().value() != world.rank())
    throw ValueError(describe("groups of a mesh", fmt::format("the mesh of rank {} on rank {}", mesh.this_rank().value(), world.rank()),
                              "the mesh as this rank has it", "give world.rank() when the mesh is made, or use as_rank()"));
  const std::vector<int>& ranks = mesh.universe();
  if (const int last = *std::max_element(ranks.begin(), ranks.end()); last >= world.size())
    throw ValueError(describe("groups of a mesh", fmt::format("rank {} in {}", last, mesh.to_string()),
                              fmt::format("ranks of the world of {}", world.size()), "start more ranks or shrink the mesh"));
}

}  // namespace

MeshGroups::MeshGroups(World world, DeviceMesh mesh) : world_(std::move(world)), mesh_(std::move(mesh)) { check(world_, mesh_); }

Group MeshGroups::group(int axis) const { return world_.group_of(mesh_.rank_list(axis)); }

Group MeshGroups::group(std::string_view name) const { return group_of(mesh_[name]); }

Group MeshGroups::group_of(const DeviceMesh& part) const {
  check(world_, part);
  if (!part.contains(part.this_rank()))
    throw ValueError(describe("group of a mesh", fmt::format("{} on rank {}", part.to_string(), world_.rank()), "a mesh with this rank in it",
                              "ask contains(rank) first"));
  return world_.group_of(part.ranks());
}

}  // namespace penstock::comm
