// The groups through which the ranks of a mesh communicate: one per axis, created on first use.
//
//   comm::MeshGroups grid = world.mesh("cpu", {{"dp", 2}, {"tp", 4}});
//   grid.group("tp").all_reduce(x).wait();       // over the ranks with the same dp coordinate
//   grid.group("dp").all_reduce(w).wait();       // over the ranks with the same tp coordinate
//   grid.mesh().flatten();
//   grid.group("dp_tp").barrier().wait();        // over all ranks of the mesh
//
// Members may request groups in any order, and only members need to (see World::group_of). Equal lists of
// ranks are the same group, whatever mesh or axis they come from. The group of an axis of size 1 contains
// this rank only.
//
// A MeshGroups is a handle of a World and a DeviceMesh. Copies are cheap; handles made from the same World
// and equal meshes are equal.
//
// Thread safety: all member functions may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "penstock/world.h"
#include "penstock/device_mesh.h"

namespace penstock::comm {

// A mesh together with the world that its ranks belong to. See World::mesh for the usual way to make one.
class MeshGroups {
 public:
  // Does not communicate. Throws ValueError if the mesh is that of another rank or contains ranks outside the
  // world.
  MeshGroups(World world, DeviceMesh mesh);

  // The mesh, seen from this rank.
  const DeviceMesh& mesh() const;
  // The world that the ranks belong to.
  const World& world() const;
  // Sizes of the axes of the mesh.
  const std::vector<std::int64_t>& shape() const;
  // Coordinate of this rank in the mesh; empty if this rank is not in the mesh.
  const std::vector<std::int64_t>& coordinate() const;

  // [collective over the members on first use] Returns the group of this rank along an axis. Throws
  // ValueError for an unknown axis and on a rank that is not in the mesh; see World::group_of for other
  // errors.
  Group group(int axis) const;
  // [collective over the members on first use] Returns the group of this rank along an axis of this name, or
  // along a flattened axis of this name. Throws as above.
  Group group(std::string_view name) const;

  // [collective over the members on first use] Returns the group of all ranks of `part` in row-major order.
  // `part` is a slice, a flattened or a concatenated mesh of this world, seen from this rank. Throws
  // ValueError if this rank is not in it; see World::group_of for other errors.
  Group group_of(const DeviceMesh& part) const;

  // Returns the groups of another mesh of the same world, such as a slice, a flattened or a concatenated
  // mesh. Does not communicate; throws like the constructor.
  MeshGroups with_mesh(const DeviceMesh& mesh) const;

  // A number that is equal for equal handles and is never reused in this process, for keys of tables.
  std::uint64_t id() const;
  // Whether both have the same world and equal meshes.
  friend bool operator==(const MeshGroups& a, const MeshGroups& b) { return a.state_ == b.state_; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace penstock::comm
