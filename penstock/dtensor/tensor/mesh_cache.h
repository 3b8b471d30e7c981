// The meshes that records mean, found by key: a record names its mesh by axis names and layout (mesh/mesh_key.h), and the rank
// that receives it looks its own mesh up here.
//
//   MeshCache meshes;
//   meshes.harvest(example_inputs);                              // the meshes of the tensors that are here already
//   const comm::MeshGroups mesh = meshes.get(record.mesh_key(), [&](const MeshKey& key) -> std::optional<comm::MeshGroups> {
//     return root.with_mesh(root.mesh().find(key));              // asked once per key
//   });
//
// A key means one mesh only among meshes of one universe: all stages of a pipeline derive theirs from the same list of ranks.
//
// Errors are PipeliningMetadataError. Holds the meshes and with them their World: let it go before the World should end.
// Thread rule: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/mesh_key.h"

namespace penstock {

// Whether the mesh is one that the key means: equal names, and an equal layout where the key has one.
bool answers(const comm::MeshGroups& mesh, const MeshKey& key);

// Gives the mesh that a key means on this rank; nothing when there is none.
using MeshGroupsCallback = std::function<std::optional<comm::MeshGroups>(const MeshKey&)>;

class MeshCache {
 public:
  // The mesh kept under the key; else what the callback gives, which is kept. Throws when it is not here and there is no
  // callback, when the callback gives nothing or a mesh of another key; what the callback throws passes through, and
  // nothing is kept then.
  comm::MeshGroups get(const MeshKey& key, const MeshGroupsCallback& callback = nullptr);

  // Takes the place of what was there. Throws for a mesh that the key does not mean.
  void insert(const MeshKey& key, comm::MeshGroups mesh);
  void insert(const comm::MeshGroups& mesh) { insert(mesh.mesh().key(), mesh); }

  // The meshes of the distributed tensors among these, under their own keys. Plain and undefined tensors are passed over. Throws for a
  // mesh whose key is here already for other ranks: a record could not tell which of the two it means.
  void harvest(const std::vector<at::Tensor>& tensors);

  bool contains(const MeshKey& key) const { return meshes_.contains(key); }
  std::size_t size() const { return meshes_.size(); }

 private:
  std::unordered_map<MeshKey, comm::MeshGroups> meshes_;
};

}  // namespace penstock
