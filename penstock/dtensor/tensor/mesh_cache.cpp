#include "penstock/dtensor/tensor/mesh_cache.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

constexpr const char* kUniverse =
    "the meshes of all stages must come from one universe: slice, flatten or concatenate them from one "
    "DeviceMesh over the same list of ranks on every rank";

}  // namespace

bool answers(const comm::MeshGroups& mesh, const MeshKey& key) {
  return mesh.mesh().names() == key.names && (!key.layout || *key.layout == mesh.mesh().layout());
}

comm::MeshGroups MeshCache::get(const MeshKey& key, const MeshGroupsCallback& callback) {
  if (const auto found = meshes_.find(key); found != meshes_.end()) return found->second;
  if (!callback)
    throw PipeliningMetadataError(
        describe("mesh cache: the mesh of a distributed record",
                 fmt::format("{}, which is not in the cache", key.to_string()),
                 fmt::format("one of the {} cached meshes, or a callback", meshes_.size()),
                 "pass a callback that finds meshes by key, or harvest tensors on this mesh"));
  std::optional<comm::MeshGroups> mesh = callback(key);
  if (!mesh)
    throw PipeliningMetadataError(describe("mesh cache: the callback",
                                           fmt::format("no mesh for {}", key.to_string()),
                                           "the mesh that the record refers to", kUniverse));
  if (!answers(*mesh, key))
    throw PipeliningMetadataError(describe("mesh cache: the callback",
                                           fmt::format("a mesh of {}", mesh->mesh().key().to_string()),
                                           key.to_string(), kUniverse));
  meshes_.insert_or_assign(key, *mesh);
  return *mesh;
}

void MeshCache::insert(const MeshKey& key, comm::MeshGroups mesh) {
  if (!answers(mesh, key))
    throw PipeliningMetadataError(describe("mesh cache: the mesh to insert", mesh.mesh().key().to_string(),
                                           fmt::format("{}, the key it is inserted under", key.to_string()),
                                           "omit the key to use the mesh's own"));
  meshes_.insert_or_assign(key, std::move(mesh));
}

void MeshCache::harvest(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (const detail::DTensorPayload* payload = tensor.defined() ? detail::dtensor_payload(tensor) : nullptr)
      if (const auto [known, added] = meshes_.try_emplace(payload->mesh.mesh().key(), payload->mesh);
          !added && !(known->second.mesh() == payload->mesh.mesh()))
        throw PipeliningMetadataError(
            describe(fmt::format("mesh cache: a second mesh for {}", known->first.to_string()),
                     payload->mesh.mesh().to_string(),
                     fmt::format("{}, which has the same names and layout", known->second.mesh().to_string()),
                     kUniverse));
}

}  // namespace penstock
