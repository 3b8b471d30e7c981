#include "penstock/optim/update/rank_reduction.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"

namespace penstock::optim {
namespace {

bool within(const comm::Group& part, const comm::Group& whole) {
  const auto& ranks = whole.ranks();
  return std::all_of(part.ranks().begin(), part.ranks().end(),
                     [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); });
}

std::size_t shared_ranks(const comm::Group& a, const comm::Group& b) {
  return static_cast<std::size_t>(std::count_if(a.ranks().begin(), a.ranks().end(), [&](int rank) {
    return std::find(b.ranks().begin(), b.ranks().end(), rank) != b.ranks().end();
  }));
}

bool has(const std::vector<comm::Group>& groups, const comm::Group& group) {
  return std::any_of(groups.begin(), groups.end(),
                     [&](const comm::Group& other) { return other.ranks() == group.ranks(); });
}

[[noreturn]] void refuse_overlap(const comm::Group& one, const comm::Group& other) {
  throw NotImplemented(
      fmt::format("parameters split over ranks [{}] and others over ranks [{}], which share more than this "
                  "rank; split them along axes of one mesh",
                  fmt::join(one.ranks(), ", "), fmt::join(other.ranks(), ", ")));
}

// Whether this rank counts a parameter that is split over the groups `split`, as far as `axis` is concerned:
// every rank along the axis has a part of its own, or all have copies and the first one counts.
bool counts_along(const comm::Group& axis, const std::vector<comm::Group>& split) {
  int parts = 1;
  for (const comm::Group& group : split) {
    if (within(axis, group)) return true;
    if (within(group, axis)) parts *= group.size();
  }
  if (parts > 1 && parts != axis.size()) refuse_overlap(axis, split.front());
  return parts > 1 || axis.axis_rank() == 0;
}

// The mesh axes along which some parameter of the list is split.
struct MeshUse {
  comm::MeshGroups mesh;
  std::vector<bool> split;
};

}  // namespace

RankReduction::RankReduction(const std::vector<NamedParameter>& parameters,
                             const std::vector<comm::Group>& groups) {
  std::vector<comm::Group> given;
  for (const comm::Group& group : groups) {
    if (!group || !group.is_member())
      throw ValueError(
          describe("groups to reduce over",
                   group ? fmt::format("{} of ranks [{}]", group.name(), fmt::join(group.ranks(), ", "))
                         : "an empty handle",
                   "groups that this rank is in",
                   "pass to each rank its own group along the axis, as MeshGroups::group returns it"));
    if (group.size() > 1 && !has(given, group)) given.push_back(group);
  }
  std::vector<MeshUse> meshes;  // in the order of the list, which all ranks of a mesh share
  for (const NamedParameter& parameter : parameters) {
    if (!is_dtensor(parameter.tensor)) continue;
    const comm::MeshGroups& mesh = mesh_of(parameter.tensor);
    const Placements& placements = placements_of(parameter.tensor);
    auto use =
        std::find_if(meshes.begin(), meshes.end(), [&](const MeshUse& other) { return other.mesh == mesh; });
    if (use == meshes.end())
      use = meshes.insert(meshes.end(), MeshUse{mesh, std::vector<bool>(placements.size(), false)});
    for (std::size_t axis = 0; axis < placements.size(); ++axis)
      if (placements[axis].splits()) use->split[axis] = true;
  }
  for (const MeshUse& use : meshes)
    for (std::size_t axis = 0; axis < use.split.size(); ++axis) {
      if (use.mesh.shape()[axis] == 1 || (!use.split[axis] && given.empty())) continue;
      const comm::Group group = use.mesh.group(static_cast<int>(axis));
      const bool covered = std::any_of(given.begin(), given.end(),
                                       [&](const comm::Group& other) { return within(group, other); });
      if ((!use.split[axis] && !covered) || has(axes_, group)) continue;
      for (const comm::Group& other : axes_)
        if (shared_ranks(group, other) > 1 && !within(group, other) && !within(other, group))
          refuse_overlap(group, other);
      axes_.push_back(group);
      if (!covered) groups_.push_back(group);
    }
  // A group within another one is summed with it.
  const std::vector<comm::Group> own = groups_;
  std::erase_if(groups_, [&](const comm::Group& group) {
    return std::any_of(own.begin(), own.end(), [&](const comm::Group& other) {
      return other.size() > group.size() && within(group, other);
    });
  });
  groups_.insert(groups_.end(), given.begin(), given.end());
}

bool RankReduction::counts_here(const at::Tensor& parameter) const {
  std::vector<comm::Group> split;
  if (!axes_.empty() && is_dtensor(parameter)) {
    const Placements& placements = placements_of(parameter);
    for (std::size_t axis = 0; axis < placements.size(); ++axis)
      if (placements[axis].splits() && mesh_of(parameter).shape()[axis] > 1)
        split.push_back(mesh_of(parameter).group(static_cast<int>(axis)));
  }
  return std::all_of(axes_.begin(), axes_.end(),
                     [&](const comm::Group& axis) { return counts_along(axis, split); });
}

void RankReduction::all_reduce(const at::Tensor& values, comm::ReduceOp op) const {
  for (const comm::Group& group : groups_)
    group.all_reduce(values, op, {.label = "numbers about all parameters", .timeout = {}}).wait();
}

}  // namespace penstock::optim
