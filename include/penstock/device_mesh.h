// A grid of ranks with named axes, seen from one rank.
//
//   DeviceMesh grid = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, 5, 8);  // seen from rank 5 of 8
//   std::vector<int> row = grid["tp"].ranks();                              // 4 5 6 7
//   DeviceMesh flat = grid.flatten();                                       // one axis; also grid["dp_tp"]
//
// Rank 5 in this mesh:
//
//              tp 0 1 2 3
//        dp 0     0 1 2 3        grid.coordinate()      (1, 1)
//        dp 1     4 5 6 7        grid["tp"].ranks()     4 5 6 7: the row of rank 5
//                                grid["dp"].ranks()     1 5: its column
//                                grid.flatten()         0 .. 7 on one axis
//
// Every rank builds the same mesh and passes its own rank; slices are then those that contain this rank.
// `as_rank` returns the view of another rank. A mesh does not communicate; comm::MeshGroups (mesh_groups.h)
// adds process groups to it.
//
// The universe is the list of ranks that a mesh was built from. Slices, flattened, unflattened and
// concatenated meshes share the universe of the mesh that they come from, which is called their root. A mesh
// is a value: copies are cheap and share the universe. Equality and hash compare universe, layout, names,
// device type and own rank. The only mutable state is the names of flattened axes, which the root remembers.
//
// A rank outside the universe may hold the root mesh: it has no coordinate, and it cannot take slices. Errors
// are ValueError; the message says what to change.
//
// Thread safety: any number of threads may use any meshes, shared ones included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/mesh_layout.h"

namespace penstock {

// A grid of ranks with named axes, seen from one rank.
class DeviceMesh {
 public:
  // Creates a root mesh. `device_type` is "cpu", "cuda", ...: letters only. `ranks` are the global ranks in
  // row-major order of `shape`: distinct and not negative. `names` has one distinct name per axis, or is
  // empty. `this_rank` is the rank that the mesh is seen from; it may be outside `ranks`. Throws ValueError
  // if an argument breaks these rules.
  DeviceMesh(const std::string& device_type, const std::vector<std::int64_t>& shape, std::vector<int> ranks,
             std::vector<std::string> names, int this_rank);

  // "cpu", "cuda", ...
  const std::string& device_type() const;
  // Names of the axes in order; empty if the mesh has no names.
  const std::vector<std::string>& names() const { return names_; }
  // Positions of the mesh's ranks in the universe.
  const MeshLayout& layout() const { return layout_; }
  // Number of axes.
  int ndim() const { return layout_.ndim(); }
  // Size of each axis.
  std::vector<std::int64_t> shape() const { return layout_.shape(); }
  // Number of ranks.
  std::int64_t size() const { return layout_.size(); }
  // Size of an axis. Throws ValueError for an axis outside [0, ndim()).
  std::int64_t size(int axis) const { return layout_.size(axis); }
  // Size of a named axis. Throws ValueError for an unknown name.
  std::int64_t size(std::string_view name) const { return layout_.size(axis(name)); }
  // Returns the position of a named axis. Throws ValueError for an unknown name; the message lists the known
  // ones.
  int axis(std::string_view name) const;

  // The global rank that the mesh is seen from.
  int this_rank() const { return this_rank_; }
  // Returns the same mesh as `rank` sees it; for a slice, the slice that contains `rank`. Throws ValueError
  // for a part of a universe that does not contain `rank`.
  DeviceMesh as_rank(int rank) const;

  // Returns the global ranks of this mesh in row-major order.
  std::vector<int> ranks() const;
  // The global ranks of the root in row-major order.
  const std::vector<int>& universe() const;
  // Whether names and layout are those of the root.
  bool is_root() const;
  // Returns the mesh that this one was derived from by slicing, flattening and so on.
  DeviceMesh root() const;

  // Whether a global rank is in this mesh.
  bool contains(int rank) const { return coordinate(rank).has_value(); }
  // Returns the coordinate of a global rank, or std::nullopt if it is not in this mesh.
  std::optional<std::vector<std::int64_t>> coordinate(int rank) const;
  // Returns the coordinate of this_rank(), or std::nullopt if it is not in this mesh.
  std::optional<std::vector<std::int64_t>> coordinate() const { return coordinate(this_rank_); }
  // Returns the position of a global rank along an axis. Throws ValueError if the rank is not in this mesh or
  // the axis does not exist; so do the overloads.
  int axis_rank(int axis, int rank) const;
  // Returns the position of this_rank() along an axis.
  int axis_rank(int axis) const { return axis_rank(axis, this_rank_); }
  // Returns the position of this_rank() along a named axis.
  int axis_rank(std::string_view name) const { return axis_rank(axis(name), this_rank_); }

  // Returns all groups of global ranks that differ in this axis only, in row-major order of the other axes.
  std::vector<std::vector<int>> rank_lists(int axis) const;
  // Returns the group of global ranks that differ from `rank` in this axis only, itself included, in axis
  // order. Throws ValueError if the rank is not in this mesh.
  std::vector<int> rank_list(int axis, int rank) const;
  // Returns the group of this_rank() along this axis.
  std::vector<int> rank_list(int axis) const { return rank_list(axis, this_rank_); }

  // Returns the sub-mesh of these axes that contains this_rank(). `names` are axes of this mesh in its order,
  // each once; the root also accepts flattened names, at the position of the axes that they join: {"pp_dp",
  // "tp"}. Axes of size 1 may appear at any position. Throws ValueError if `names` is empty, unknown,
  // repeated or in another order.
  DeviceMesh slice(const std::vector<std::string>& names) const;
  // Returns slice({name}).
  DeviceMesh operator[](std::string_view name) const { return slice({std::string(name)}); }
  // Returns slice(names).
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;

  // Returns a mesh with one axis that runs through `axes` of this mesh, the last one fastest. Empty `axes`:
  // all of them. Empty `name`: the names joined by underscores, "dp_tp". The root remembers the axis, so that
  // root()[name] returns it from now on. Flattening the same axes again returns an equal mesh; flattening one
  // axis under its own name returns that axis. Throws ValueError for a mesh without names and for a name that
  // an axis or other flattened axes already have.
  DeviceMesh flatten(const std::vector<std::string>& axes = {}, const std::string& name = "") const;

  // Returns a mesh in which `axis` is replaced by several axes of these sizes. `names` has one name per size;
  // it must be empty for a mesh without names. Throws ValueError if the product of the sizes is not the size
  // of the axis.
  DeviceMesh unflatten(int axis, const std::vector<std::int64_t>& shape,
                       const std::vector<std::string>& names) const;
  // The same for a named axis.
  DeviceMesh unflatten(std::string_view name, const std::vector<std::int64_t>& shape,
                       const std::vector<std::string>& names) const;

  // Returns a mesh with the axes of all `meshes`, in this order. Throws ValueError unless they have the same
  // universe, device type and this_rank(), do not overlap, and all have distinct names or all have none.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  // Returns what identifies this mesh to other ranks of its universe.
  MeshKey key() const { return {names_, layout_}; }
  // Returns the mesh of this universe that a key from another rank refers to, as this_rank() sees it. A key
  // without a layout is sliced from the root by its names. Throws ValueError for a key that does not fit this
  // universe.
  DeviceMesh find(const MeshKey& key) const;

  // Returns "DeviceMesh(cpu, dp=2 x tp=4, ranks [[0,1,2,3],[4,5,6,7]])"; the ranks of meshes of more than 64
  // are abridged.
  std::string to_string() const;

  // Compares universe, layout, names, device type and this_rank().
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);

 private:
  struct Root;
  friend struct std::hash<DeviceMesh>;
  DeviceMesh(std::shared_ptr<Root> root, MeshLayout layout, std::vector<std::string> names, int this_rank);

  // Axes or flattened names, each once and known.
  std::vector<AxisLayout> axes_named(const std::vector<std::string>& names) const;

  std::shared_ptr<Root> root_;
  MeshLayout layout_;
  std::vector<std::string> names_;
  int this_rank_ = 0;
  std::int64_t origin_ = 0;  // universe()[origin_ + layout_.index(c)] is the rank at coordinate c
};

// Creates a root mesh of ranks 0, 1, ... in row-major order, seen from `rank`. If `world_size` exceeds the
// product of `shape`, the last ranks are outside the mesh. Throws ValueError for a rank outside [0,
// world_size), a shape of more than `world_size` ranks, and as the constructor of DeviceMesh does. Does not
// communicate.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<std::int64_t>& shape,
                            const std::vector<std::string>& names, int rank, int world_size);

// Finds the mesh that a record refers to; returns std::nullopt if there is none. If all meshes have one root,
// `mesh.find(key)` does the same.
using MeshCallback = std::function<std::optional<DeviceMesh>(const std::vector<std::string>& names,
                                                             const std::optional<MeshLayout>& layout)>;

}  // namespace penstock

// Hash that agrees with operator==.
template <>
struct std::hash<penstock::DeviceMesh> {
  // Returns the hash of a mesh.
  std::size_t operator()(const penstock::DeviceMesh& mesh) const noexcept;
};
