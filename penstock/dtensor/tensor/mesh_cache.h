// Finds the meshes that records refer to: a record identifies its mesh by axis names and layout
// (mesh/mesh_key.h), and the receiving rank looks up its own mesh here.
//
//   MeshCache meshes;
//   meshes.harvest(example_inputs);                              // the meshes of existing tensors
//   const comm::MeshGroups mesh = meshes.get(record.mesh_key(),
//       [&](const MeshKey& key) -> std::optional<comm::MeshGroups> {
//     return root.with_mesh(root.mesh().find(key));              // called once per key
//   });
//
// A key identifies a mesh only among meshes of one universe: all stages of a pipeline must derive theirs from
// the same list of ranks.
//
// Errors are PipeliningMetadataError. Holds the meshes and through them their World: destroy it before the
// World should end.
// Thread safety: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "penstock/dtensor/tensor/mesh_cache.h"
#include "penstock/mesh_layout.h"
#include "penstock/world.h"

namespace penstock {

// Returns whether the key identifies the mesh: equal names, and an equal layout if the key has one.
bool answers(const comm::MeshGroups& mesh, const MeshKey& key);

// Returns the mesh that a key identifies on this rank, or std::nullopt if there is none.
using MeshGroupsCallback = std::function<std::optional<comm::MeshGroups>(const MeshKey&)>;

class MeshCache {
 public:
  // Returns the mesh cached under the key, otherwise the callback's result, which is then cached. Throws if
  // the mesh is not cached and there is no callback, or if the callback returns std::nullopt or a mesh of
  // another key. Exceptions of the callback propagate, and nothing is cached then.
  comm::MeshGroups get(const MeshKey& key, const MeshGroupsCallback& callback = nullptr);

  // Replaces an existing entry. Throws for a mesh that the key does not identify.
  void insert(const MeshKey& key, comm::MeshGroups mesh);
  void insert(const comm::MeshGroups& mesh) { insert(mesh.mesh().key(), mesh); }

  // Adds the meshes of the distributed tensors among these, under their own keys. Plain and undefined tensors
  // are skipped. Throws for a mesh whose key is already present with other ranks: a record would be
  // ambiguous.
  void harvest(const std::vector<at::Tensor>& tensors);

  bool contains(const MeshKey& key) const { return meshes_.contains(key); }
  std::size_t size() const { return meshes_.size(); }

 private:
  std::unordered_map<MeshKey, comm::MeshGroups> meshes_;
};

}  // namespace penstock
