// A grid of ranks with named axes, seen from one rank.
//
//   DeviceMesh mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, 5, 8);
//
//              tp 0 1 2 3
//        dp 0     0 1 2 3        mesh.coordinate()      (1, 1)
//        dp 1     4 5 6 7        mesh["tp"].ranks()     4 5 6 7: the row of rank 5
//                                mesh["dp"].ranks()     1 5: its column
//                                mesh.flatten()         0 .. 7 on one axis, also mesh["dp_tp"] from now on
//
// Every rank builds the same mesh and gives its own rank; slices are then the ones this rank lies in, as in
// all of this class. `as_rank` gives the view of another rank.
//
// The universe is the list of ranks a mesh was built from. Slices, flattened, unflattened and concatenated
// meshes share the universe of the mesh they come from, which is called their root. A mesh is a value: copies
// are cheap and share the universe, equality and hash compare what the mesh says (universe, layout, names,
// device type and own rank; equal meshes answer every question alike). The only thing that changes are the
// names of flattened axes, which the root remembers.
//
// A rank outside the universe may hold the root mesh: it has no coordinate, and it cannot take slices.
// Thread rule: any number of threads may use any meshes.
//
// Errors are ValueError and say what to change.
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

class DeviceMesh {
 public:
  // `ranks` in row-major order of `shape`: distinct, not negative. `names`: one per axis, distinct, or none
  // at all. `device_type`: "cpu", "cuda", ...; letters only.
  DeviceMesh(const std::string& device_type, const std::vector<std::int64_t>& shape, std::vector<int> ranks,
             std::vector<std::string> names, int this_rank);

  const std::string& device_type() const;
  const std::vector<std::string>& names() const { return names_; }  // empty when there are none
  const MeshLayout& layout() const { return layout_; }
  int ndim() const { return layout_.ndim(); }
  std::vector<std::int64_t> shape() const { return layout_.shape(); }
  std::int64_t size() const { return layout_.size(); }
  std::int64_t size(int axis) const { return layout_.size(axis); }
  std::int64_t size(std::string_view name) const { return layout_.size(axis(name)); }
  // Position of a named axis. Throws for a name that is not there, with the names that are.
  int axis(std::string_view name) const;

  int this_rank() const { return this_rank_; }
  // The same mesh as that rank has it: of a slice, the slice that rank lies in.
  DeviceMesh as_rank(int rank) const;

  // Global ranks of this mesh, row-major.
  std::vector<int> ranks() const;
  // Global ranks of the root, row-major.
  const std::vector<int>& universe() const;
  // Whether this is the mesh that its slices and flattened axes come from.
  bool is_root() const;
  DeviceMesh root() const;

  bool contains(int rank) const { return coordinate(rank).has_value(); }
  // Nothing when the rank is not in this mesh.
  std::optional<std::vector<std::int64_t>> coordinate(int rank) const;
  std::optional<std::vector<std::int64_t>> coordinate() const { return coordinate(this_rank_); }
  // Position of a rank along an axis. Throws when the rank is not in this mesh.
  int axis_rank(int axis, int rank) const;
  int axis_rank(int axis) const { return axis_rank(axis, this_rank_); }
  int axis_rank(std::string_view name) const { return axis_rank(axis(name), this_rank_); }

  // The ranks that differ in this axis alone: all such groups, in row-major order of the other axes, and the
  // one that holds a rank.
  std::vector<std::vector<int>> rank_lists(int axis) const;
  std::vector<int> rank_list(int axis, int rank) const;
  std::vector<int> rank_list(int axis) const { return rank_list(axis, this_rank_); }

  // The sub-mesh of these axes that this rank lies in. Names are axes of this mesh in its order; on the root
  // also flattened names, which stand where their axes stand: {"pp_dp", "tp"}. Axes of one rank may stand anywhere. An axis is named once.
  DeviceMesh slice(const std::vector<std::string>& names) const;
  DeviceMesh operator[](std::string_view name) const { return slice({std::string(name)}); }
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;

  // One axis that runs through these axes of this mesh (all of them by default), called `name` ("dp_tp" by
  // default). The root finds it under that name from now on. Flattening the same axes again gives the same
  // mesh; a single axis that keeps its name is itself.
  DeviceMesh flatten(const std::vector<std::string>& axes = {}, const std::string& name = "") const;

  // One axis becomes several. `names` must be empty for a mesh without names.
  DeviceMesh unflatten(int axis, const std::vector<std::int64_t>& shape,
                       const std::vector<std::string>& names) const;
  DeviceMesh unflatten(std::string_view name, const std::vector<std::int64_t>& shape,
                       const std::vector<std::string>& names) const;

  // The axes of all meshes in one mesh, in this order. They must come from one universe and not overlap.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  // What a record says of this mesh, and the mesh of this universe that a record means, as this rank has it.
  MeshKey key() const { return {names_, layout_}; }
  DeviceMesh find(const MeshKey& key) const;

  // "DeviceMesh(cpu, dp=2 x tp=4, ranks [[0,1,2,3],[4,5,6,7]])".
  std::string to_string() const;

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

// Ranks 0, 1, ... in row-major order. `world_size` may exceed the product of `shape`: the last ranks are then
// outside.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<std::int64_t>& shape,
                            const std::vector<std::string>& names, int rank, int world_size);

// Finds the mesh that a record means; nothing when there is none. `mesh.find(key)` serves where one root
// knows all.
using MeshCallback = std::function<std::optional<DeviceMesh>(const std::vector<std::string>& names,
                                                             const std::optional<MeshLayout>& layout)>;

}  // namespace penstock

template <>
struct std::hash<penstock::DeviceMesh> {
  std::size_t operator()(const penstock::DeviceMesh& mesh) const noexcept;
};
