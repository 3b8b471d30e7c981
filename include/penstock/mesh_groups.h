// The groups that the ranks of a mesh talk through: one per axis, made when it is first asked for.
//
//   DeviceMesh mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, world.rank(), world.size());
//   MeshGroups groups(world, mesh);
//   groups.group("tp").all_reduce(activations).wait();      // over the row of this rank
//   groups.group("dp").all_reduce(gradients).wait();        // over its column
//   mesh.flatten();
//   groups.group("dp_tp").barrier().wait();                 // over all ranks of the mesh
//
// Members ask in any order and only they need to ask (World::group_of). Equal lists of ranks are one group, whatever mesh
// or axis they come from; an axis of size 1 is a group of this rank alone.
//
// A value that holds the World and the mesh; copies are cheap, and two that were made of one World and equal meshes are
// equal. Thread rule: that of World::group_of.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "penstock/world.h"
#include "penstock/device_mesh.h"

namespace penstock::comm {

class MeshGroups {
 public:
  // No communication. Throws ValueError when the mesh is another rank's or larger than the world.
  MeshGroups(World world, DeviceMesh mesh);

  const DeviceMesh& mesh() const;
  const World& world() const;
  // Of the mesh, without a copy.
  const std::vector<std::int64_t>& shape() const;
  // Of this rank; empty on a rank that is not in the mesh.
  const std::vector<std::int64_t>& coordinate() const;

  // Along an axis, or along a flattened axis that the mesh finds under this name. Throws ValueError for an unknown axis and
  // on a rank that is not in the mesh, and what World::group_of throws.
  Group group(int axis) const;
  Group group(std::string_view name) const;

  // All ranks of this rank's part of the mesh, row-major: of a slice, a flattened or a concatenated mesh of this world.
  Group group_of(const DeviceMesh& part) const;

  // The groups of another mesh of this world: of a slice, a flattened or a concatenated mesh.
  MeshGroups with_mesh(const DeviceMesh& mesh) const;

  // The same number for equal ones, never given to another one in this process: for the keys of tables.
  std::uint64_t id() const;
  friend bool operator==(const MeshGroups& a, const MeshGroups& b) { return a.state_ == b.state_; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace penstock::comm
