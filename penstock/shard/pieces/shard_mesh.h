// The data-parallel axes of a mesh: along which parameters are cut, and along which they are repeated.
//
//   FSDP        one axis that shards                      [S]
//   HSDP        replicate x shard                         [R, S]
//   replicate   one axis that replicates                  [R]
//   SPMD        a larger mesh with these axes by name     [S, (tp), ...]
//
// A value. Making the groups of the axes needs the ranks along them, at first use (MeshGroups::group).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/placement.h"
#include "penstock/shard/pieces/policies.h"
#include "penstock/shard/layout/shard_layout.h"

namespace penstock {

class ShardMesh {
 public:
  // Axes as ShardOptions says. Throws ValueError for a mesh that does not fit, naming the axes it has.
  ShardMesh(const comm::MeshGroups& mesh, const ShardOptions& options);
  // Every axis replicates.
  static ShardMesh replicating(const comm::MeshGroups& mesh);

  // The data-parallel axes alone, replicating ones first or as they stand in the mesh.
  const comm::MeshGroups& mesh() const { return mesh_; }
  const std::vector<int>& shard_axes() const { return shard_axes_; }          // of mesh()
  const std::vector<int>& replicate_axes() const { return replicate_axes_; }  // of mesh()

  // Whether both have the same axes on the same ranks.
  bool same_as(const ShardMesh& other) const { return mesh_ == other.mesh_ && shard_axes_ == other.shard_axes_ && replicate_axes_ == other.replicate_axes_; }

  int shard_ranks() const { return shard_ranks_; }
  int shard_rank() const { return shard_rank_; }  // of this rank
  int replicas() const { return replicas_; }
  // Of all ranks that share the parameters, and of those that hold equal shards. Asked for at first use. Gathers and reductions go
  // through groups of their own: what a rank gathers never waits behind what it reduces, and each of the two has one order. Between CPU tensors of
  // processes of one host they use World::low_latency_transport().
  comm::Group gather_group() const;
  comm::Group reduce_group() const;
  comm::Group replicate_group() const;
  // The ranks in blocks of `ranks` along the shard axis: this rank's block.
  comm::Group block_group(int ranks) const;

 private:
  ShardMesh(comm::MeshGroups mesh, std::vector<int> shard_axes, std::vector<int> replicate_axes);
  comm::Group group_of(const std::vector<int>& ranks, const std::string& purpose) const;
  comm::Group group_along(const std::vector<int>& axes, const std::string& purpose) const;

  comm::MeshGroups mesh_;
  std::vector<int> shard_axes_, replicate_axes_;
  int shard_ranks_ = 1, shard_rank_ = 0, replicas_ = 1;
  // What was asked for. One thread at a time uses a value of this class.
  mutable comm::Group gather_, reduce_, replicate_;
};

// How one parameter lies before and after sharding.
struct ParameterPlacement {
  SpecPtr sharded;                            // of the whole tensor, dtype of the parameter
  comm::MeshGroups mesh;                      // of `sharded`
  SpecPtr original;                           // of a parameter that was distributed (tensor or expert parallel); else null
  std::optional<comm::MeshGroups> original_mesh;
  std::vector<int> data_axes;                 // axes of the original mesh that are data-parallel ones (SPMD)
  ShardLayout layout;                         // of the local data
};

// Throws ValueError for a dim or a mesh that does not fit; `name` is the parameter's, for the message.
ParameterPlacement place_parameter(const std::string& name, const at::Tensor& parameter, const ShardMesh& mesh, const Shard& shard);

}  // namespace penstock
