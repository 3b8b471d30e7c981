// The metadata of a distributed tensor: the geometry of the whole tensor and its placements on a mesh.
//
// Specs are immutable and unique: equal specs are the same object, so they are compared and looked up by
// address. They identify their mesh by number and hold no communicator, so caches of specs may outlive every
// World.
// Thread safety: any thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/placement.h"
#include "penstock/sharding_rule.h"
#include "penstock/world.h"

namespace penstock {

GlobalGeometry global_geometry_of(const at::Tensor& tensor);
// Row-major.
std::vector<std::int64_t> contiguous_stride(const std::vector<std::int64_t>& shape);
// The strides of a dense tensor of `shape` whose dims have the memory order given by `stride`.
std::vector<std::int64_t> dense_stride(const std::vector<std::int64_t>& shape,
                                       const std::vector<std::int64_t>& stride);

class DTensorSpec;
using SpecPtr = std::shared_ptr<const DTensorSpec>;

class DTensorSpec {
 public:
  // Returns the unique spec of these values. Throws ValueError for placements that do not match the mesh or
  // the tensor.
  static SpecPtr get(const comm::MeshGroups& mesh, const Placements& placements,
                     const GlobalGeometry& geometry);
  // On the same mesh.
  static SpecPtr get(const DTensorSpec& like, const Placements& placements, const GlobalGeometry& geometry);

  std::uint64_t mesh_id() const { return mesh_id_; }
  const std::vector<std::int64_t>& mesh_shape() const { return mesh_shape_; }
  // Of this rank; empty if it is not in the mesh.
  const std::vector<std::int64_t>& coordinate() const { return coordinate_; }

  const Placements& placements() const { return placements_; }
  const GlobalGeometry& geometry() const { return geometry_; }
  const std::vector<std::int64_t>& shape() const { return geometry_.shape; }
  std::int64_t ndim() const { return static_cast<std::int64_t>(geometry_.shape.size()); }

  // The shape of this rank's part; (0) on a rank outside of the mesh.
  const std::vector<std::int64_t>& local_shape() const { return local_shape_; }
  bool has_partial() const { return has_partial_; }
  bool is_replicated() const { return replicated_; }

  SpecPtr with_placements(const Placements& placements) const { return get(*this, placements, geometry_); }

  // "float32[4, 6] as [S(0), R] on (2, 2)"
  std::string to_string() const;

 private:
  DTensorSpec() = default;
  std::size_t hash() const;
  bool same_as(const DTensorSpec& other) const;
  static SpecPtr intern(DTensorSpec&& spec);

  std::uint64_t mesh_id_ = 0;
  std::vector<std::int64_t> mesh_shape_, coordinate_;
  Placements placements_;
  GlobalGeometry geometry_;
  std::vector<std::int64_t> local_shape_;
  bool has_partial_ = false;
  bool replicated_ = false;
};

}  // namespace penstock
