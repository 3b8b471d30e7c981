#include "penstock/shard/pieces/shard_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

// The positions of `names` in a mesh. Returns std::nullopt unless the mesh has all of them.
std::optional<std::vector<int>> axes_in(const DeviceMesh& mesh, const std::vector<std::string>& names) {
  std::vector<int> axes;
  for (const std::string& name : names) {
    const auto found = std::find(mesh.names().begin(), mesh.names().end(), name);
    if (found == mesh.names().end()) return std::nullopt;
    axes.push_back(static_cast<int>(found - mesh.names().begin()));
  }
  return axes;
}

std::vector<std::string> names_of(const DeviceMesh& mesh, const std::vector<int>& axes) {
  std::vector<std::string> names;
  if (!mesh.names().empty())
    for (const int axis : axes) names.push_back(mesh.names()[static_cast<std::size_t>(axis)]);
  return names;
}

GlobalGeometry dense(GlobalGeometry geometry) {
  geometry.stride = contiguous_stride(geometry.shape);
  return geometry;
}

// The parameter's mesh has axes of the same names: they must join the same ranks in the same order, otherwise
// "along dp" would be ambiguous.
void check_same_axes(const std::string& name, const DeviceMesh& data, const DeviceMesh& own,
                     const std::vector<int>& position) {
  for (int axis = 0; axis < data.ndim(); ++axis) {
    const int at = position[static_cast<std::size_t>(axis)];
    const auto refuse = [&](int rank) {
      throw ValueError(
          describe(fmt::format("fully_shard: axis '{}' of the mesh of parameter '{}'",
                               data.names()[static_cast<std::size_t>(axis)], name),
                   fmt::format("ranks [{}] from rank {}, in {}",
                               fmt::join(own.as_rank(rank).rank_list(at), ", "), rank, own.to_string()),
                   fmt::format("ranks [{}], as in the mesh of fully_shard, {}",
                               fmt::join(data.as_rank(rank).rank_list(axis), ", "), data.to_string()),
                   "distribute the parameter and shard the module on one mesh and its slices"));
    };
    // For meshes of one universe the layouts describe all ranks at once, so that all ranks come to the same
    // decision.
    if (data.universe() == own.universe()) {
      if (!(data.layout().axis_layout(axis) == own.layout().axis_layout(at))) {
        const std::vector<int> ranks = own.ranks();
        const auto differs = [&](int rank) {
          return data.as_rank(rank).rank_list(axis) != own.as_rank(rank).rank_list(at);
        };
        const auto found = std::find_if(ranks.begin(), ranks.end(), differs);
        refuse(found == ranks.end() ? data.this_rank() : *found);
      }
      continue;
    }
    for (const int rank : own.ranks()) {
      if (std::find(data.universe().begin(), data.universe().end(), rank) == data.universe().end()) continue;
      if (data.as_rank(rank).rank_list(axis) != own.as_rank(rank).rank_list(at)) refuse(rank);
    }
  }
}

// The placement of a data-parallel axis that shards what other axes have sharded before.
Placement shard_after(std::int64_t dim, std::int64_t pieces) {
  return pieces > 1 ? Placement(StridedShard{dim, pieces}) : Placement(Shard{dim});
}

}  // namespace

ShardMesh::ShardMesh(comm::MeshGroups mesh, std::vector<int> shard_axes, std::vector<int> replicate_axes)
    : mesh_(std::move(mesh)), shard_axes_(std::move(shard_axes)), replicate_axes_(std::move(replicate_axes)) {
  // Placements and groups follow the order of the mesh, not the order in which the axes were named.
  std::sort(shard_axes_.begin(), shard_axes_.end());
  std::sort(replicate_axes_.begin(), replicate_axes_.end());
  if (mesh_.coordinate().empty())
    throw ValueError(describe(
        "the mesh of fully_shard",
        fmt::format("{}, which does not contain rank {}", mesh_.mesh().to_string(), mesh_.mesh().this_rank()),
        "a mesh that contains this rank", "call fully_shard only on the ranks of the mesh"));
  for (const int axis : shard_axes_) {
    const auto at = static_cast<std::size_t>(axis);
    shard_ranks_ *= static_cast<int>(mesh_.shape()[at]);
    shard_rank_ =
        shard_rank_ * static_cast<int>(mesh_.shape()[at]) + static_cast<int>(mesh_.coordinate()[at]);
  }
  for (const int axis : replicate_axes_)
    replicas_ *= static_cast<int>(mesh_.shape()[static_cast<std::size_t>(axis)]);
}

ShardMesh::ShardMesh(const comm::MeshGroups& mesh, const ShardOptions& options)
    : ShardMesh([&] {
        const DeviceMesh& whole = mesh.mesh();
        if (options.shard_axes.empty() && options.replicate_axes.empty()) {
          if (whole.ndim() == 1) return ShardMesh(mesh, {0}, {});
          if (whole.ndim() == 2) return ShardMesh(mesh, {1}, {0});
          throw ValueError(describe(
              "the mesh of fully_shard", whole.to_string(), "one axis (shard) or two (replicate, shard)",
              "name the data-parallel axes of a larger mesh in ShardOptions::shard_axes and replicate_axes"));
        }
        std::vector<std::string> names = options.replicate_axes;
        names.insert(names.end(), options.shard_axes.begin(), options.shard_axes.end());
        std::vector<int> all;
        for (const std::string& name : names) all.push_back(whole.axis(name));
        std::vector<int> sorted = all;
        std::sort(sorted.begin(), sorted.end());
        if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
          throw ValueError(describe("ShardOptions: shard_axes and replicate_axes",
                                    fmt::format("{}", fmt::join(names, ", ")), "every axis once"));
        const comm::MeshGroups part = static_cast<int>(names.size()) == whole.ndim()
                                          ? mesh
                                          : mesh.with_mesh(whole.slice(names_of(whole, sorted)));
        return ShardMesh(part, *axes_in(part.mesh(), options.shard_axes),
                         *axes_in(part.mesh(), options.replicate_axes));
      }()) {}

ShardMesh ShardMesh::replicating(const comm::MeshGroups& mesh) {
  std::vector<int> axes;
  for (int axis = 0; axis < mesh.mesh().ndim(); ++axis) axes.push_back(axis);
  return ShardMesh(mesh, {}, axes);
}

comm::Group ShardMesh::group_along(const std::vector<int>& axes, const std::string& purpose) const {
  std::vector<int> sorted = axes;
  std::sort(sorted.begin(), sorted.end());
  const DeviceMesh& mesh = mesh_.mesh();
  const std::vector<int> ranks = sorted.size() == 1 ? mesh.rank_list(sorted[0])
                                 : static_cast<int>(sorted.size()) == mesh.ndim()
                                     ? mesh.ranks()
                                     : mesh.slice(names_of(mesh, sorted)).ranks();
  return group_of(ranks, purpose);
}

// Gathers and reductions are frequent and waited for: data takes the fastest path between processes of a
// host, and is summed in a fixed order.
comm::Group ShardMesh::group_of(const std::vector<int>& ranks, const std::string& purpose) const {
  const comm::World& world = mesh_.world();
  return world.group_of(ranks, comm::MemberGroupOptions{.purpose = purpose,
                                                        .p2p = mesh_.mesh().device_type() == "cpu"
                                                                   ? world.low_latency_transport()
                                                                   : comm::P2PTransport::Auto});
}

comm::Group ShardMesh::gather_group() const {
  if (!gather_) gather_ = group_along(shard_axes_, "gather");
  return gather_;
}

comm::Group ShardMesh::reduce_group() const {
  if (!reduce_) reduce_ = group_along(shard_axes_, "reduce");
  return reduce_;
}

comm::Group ShardMesh::replicate_group() const {
  if (!replicate_) replicate_ = group_along(replicate_axes_, "reduce");
  return replicate_;
}

comm::Group ShardMesh::block_group(int ranks) const {
  const comm::Group all = gather_group();
  if (ranks == shard_ranks_) return all;
  const auto first = all.ranks().begin() + shard_rank_ / ranks * ranks;
  return group_of(std::vector<int>(first, first + ranks), "gather");
}

ParameterPlacement place_parameter(const std::string& name, const at::Tensor& parameter,
                                   const ShardMesh& mesh, const Shard& shard) {
  const bool cut = !mesh.shard_axes().empty();
  const std::int64_t ndim = parameter.dim();
  const int ranks = mesh.shard_ranks();
  if (cut && ndim > 0 && (shard.dim < -ndim || shard.dim >= ndim))
    throw ValueError(describe(
        fmt::format("fully_shard: the dim to shard of '{}'", name), std::to_string(shard.dim),
        fmt::format("{} to {}, for the shape [{}]", -ndim, ndim - 1, fmt::join(parameter.sizes(), ", ")),
        "change what ShardOptions::shard_placement returns"));
  const std::int64_t dim = ndim == 0 ? 0 : shard.dim < 0 ? shard.dim + ndim : shard.dim;
  const GlobalGeometry geometry = dense(global_geometry_of(parameter));
  const detail::DTensorPayload* payload = detail::dtensor_payload(parameter);
  const auto layout_of = [&](const std::vector<std::int64_t>& local) {
    try {
      return ShardLayout(local, dim, ranks);
    } catch (const ValueError& error) {
      throw ValueError(fmt::format("fully_shard: parameter '{}': {}", name, error.what()));
    }
  };
  const auto check_even = [&](const ShardLayout& layout) {
    if (mesh.shard_axes().size() > 1 && !layout.even())
      throw ValueError(describe(fmt::format("fully_shard: dim {} of '{}' over several shard axes", dim, name),
                                fmt::format("size {}", layout.shape()[static_cast<std::size_t>(dim)]),
                                fmt::format("a multiple of {}", ranks),
                                "flatten the shard axes of the mesh to one, which may cut unevenly"));
  };

  if (!payload) {
    Placements placements(mesh.mesh().shape().size());
    // A 0-dim parameter stays whole on one rank; the layout rejects several ranks.
    if (ndim > 0)
      for (const int axis : mesh.shard_axes()) placements[static_cast<std::size_t>(axis)] = Shard{dim};
    ParameterPlacement placed{DTensorSpec::get(mesh.mesh(), placements, geometry),
                              mesh.mesh(),
                              nullptr,
                              std::nullopt,
                              {},
                              layout_of(geometry.shape)};
    check_even(placed.layout);
    return placed;
  }

  const Placements& before = payload->spec->placements();
  for (const Placement& placement : before)
    if (placement.is_partial())
      throw ValueError(describe(fmt::format("fully_shard: the distributed parameter '{}'", name),
                                to_string(before), "placements that shard or replicate"));
  const DeviceMesh& own = payload->mesh.mesh();
  const auto pieces_of_dim = [&](std::size_t first) {
    std::int64_t pieces = 1;
    for (std::size_t axis = first; axis < before.size(); ++axis)
      if (before[axis].splits(dim)) pieces *= payload->mesh.shape()[axis];
    return pieces;
  };
  // With the same dense geometry on its own mesh.
  const SpecPtr original = DTensorSpec::get(payload->mesh, before, geometry);
  const std::vector<std::string> names = mesh.mesh().mesh().names();
  const auto inside = !names.empty() ? axes_in(own, names) : std::nullopt;
  if (inside) {
    // The parameter's mesh also contains the data-parallel axes.
    check_same_axes(name, mesh.mesh().mesh(), own, *inside);
    Placements placements = before;
    const auto position = [&](int axis) {
      return static_cast<std::size_t>((*inside)[static_cast<std::size_t>(axis)]);
    };
    for (const int axis : mesh.replicate_axes())
      if (!before[position(axis)].is_replicate())
        throw ValueError(
            describe(fmt::format("fully_shard: placement of '{}' on the replicate axis '{}' ({})", name,
                                 names[static_cast<std::size_t>(axis)], position(axis)),
                     before[position(axis)].to_string(), "R", "distribute it with R, or name another axis"));
    for (const int axis : mesh.shard_axes()) {
      const std::size_t at = position(axis);
      if (!before[at].is_replicate())
        throw ValueError(describe(fmt::format("fully_shard: placement of '{}' on the shard axis '{}' ({})",
                                              name, names[static_cast<std::size_t>(axis)], at),
                                  before[at].to_string(), "R", "distribute it with R, or name another axis"));
      placements[at] = shard_after(dim, pieces_of_dim(at + 1));
    }
    ParameterPlacement placed{DTensorSpec::get(payload->mesh, placements, geometry),
                              payload->mesh,
                              original,
                              payload->mesh,
                              *inside,
                              layout_of(original->local_shape())};
    check_even(placed.layout);
    return placed;
  }
  const comm::MeshGroups joint = [&] {
    try {
      return mesh.mesh().with_mesh(DeviceMesh::concatenate({mesh.mesh().mesh(), own}));
    } catch (const ValueError& error) {
      throw ValueError(fmt::format(
          "fully_shard: the mesh of parameter '{}' cannot be joined with the mesh of fully_shard: {}", name,
          error.what()));
    }
  }();
  Placements placements(mesh.mesh().shape().size());
  for (const int axis : mesh.shard_axes())
    placements[static_cast<std::size_t>(axis)] = shard_after(dim, pieces_of_dim(0));
  placements.insert(placements.end(), before.begin(), before.end());
  ParameterPlacement placed{DTensorSpec::get(joint, placements, geometry),
                            joint,
                            original,
                            payload->mesh,
                            {},
                            layout_of(original->local_shape())};
  check_even(placed.layout);
  return placed;
}

}  // namespace penstock
