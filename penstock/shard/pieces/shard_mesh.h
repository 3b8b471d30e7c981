// The data-parallel axes of a mesh: those along which parameters are sharded, and those along which they are
// replicated.
//
//   FSDP        one axis that shards                      [S]
//   HSDP        replicate x shard                         [R, S]
//   replicate   one axis that replicates                  [R]
//   SPMD        a larger mesh with these axes by name     [S, (tp), ...]
//
// A value. The groups of the axes are created at first use (MeshGroups::group), collectively over the ranks
// along them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/dtensor/tensor/spec.h"
#include "penstock/placement.h"
#include "penstock/shard/layout/shard_layout.h"
#include "penstock/shard_options.h"
#include "penstock/world.h"

namespace penstock {

class ShardMesh {
 public:
  // Selects the axes according to ShardOptions. Throws ValueError for a mesh that does not fit, naming its
  // axes.
  ShardMesh(const comm::MeshGroups& mesh, const ShardOptions& options);
  // Every axis replicates.
  static ShardMesh replicating(const comm::MeshGroups& mesh);

  // The data-parallel axes alone, replicating ones first or in the order of the mesh.
  const comm::MeshGroups& mesh() const { return mesh_; }
  const std::vector<int>& shard_axes() const { return shard_axes_; }          // of mesh()
  const std::vector<int>& replicate_axes() const { return replicate_axes_; }  // of mesh()

  // Whether both have the same axes on the same ranks.
  bool same_as(const ShardMesh& other) const {
    return mesh_ == other.mesh_ && shard_axes_ == other.shard_axes_ &&
           replicate_axes_ == other.replicate_axes_;
  }

  int shard_ranks() const { return shard_ranks_; }
  int shard_rank() const { return shard_rank_; }  // of this rank
  int replicas() const { return replicas_; }
  // The groups of all ranks that share the parameters, and of those that hold equal shards. Created at first
  // use. Gathers and reductions use separate groups: a gather never waits for an earlier reduction, and each
  // of the two has its own order. For CPU tensors of processes on one host they use
  // World::low_latency_transport().
  comm::Group gather_group() const;
  comm::Group reduce_group() const;
  comm::Group replicate_group() const;
  // The ranks along the shard axis in blocks of `ranks`: the block of this rank.
  comm::Group block_group(int ranks) const;

 private:
  ShardMesh(comm::MeshGroups mesh, std::vector<int> shard_axes, std::vector<int> replicate_axes);
  comm::Group group_of(const std::vector<int>& ranks, const std::string& purpose) const;
  comm::Group group_along(const std::vector<int>& axes, const std::string& purpose) const;

  comm::MeshGroups mesh_;
  std::vector<int> shard_axes_, replicate_axes_;
  int shard_ranks_ = 1, shard_rank_ = 0, replicas_ = 1;
  // Created at first use. A value of this class is used by one thread at a time.
  mutable comm::Group gather_, reduce_, replicate_;
};

// The layout of one parameter before and after sharding.
struct ParameterPlacement {
  SpecPtr sharded;        // of the whole tensor, dtype of the parameter
  comm::MeshGroups mesh;  // of `sharded`
  // Null unless the parameter was already distributed (tensor or expert parallel).
  SpecPtr original;
  std::optional<comm::MeshGroups> original_mesh;
  std::vector<int> data_axes;  // axes of the original mesh that are data-parallel (SPMD)
  ShardLayout layout;          // of the local data
};

// Throws ValueError for a dim or a mesh that does not fit; the message uses `name`, the parameter's name.
ParameterPlacement place_parameter(const std::string& name, const at::Tensor& parameter,
                                   const ShardMesh& mesh, const Shard& shard);

}  // namespace penstock
