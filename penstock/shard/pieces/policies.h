// Options of sharding, apart from the mesh. Values.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/placement.h"
#include "penstock/shard/pieces/extension.h"

namespace penstock {

// Parameters that are not floating point keep their dtype. std::nullopt means no cast.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype;   // of the gathered parameter, and of the bytes sent
  std::optional<at::ScalarType> reduce_dtype;  // for reducing gradients; default: the dtype of the gradient
  std::optional<at::ScalarType> output_dtype;  // of what ForwardScope::output returns
  bool cast_forward_inputs = true;             // floating point inputs of the operators that take a parameter, and of ForwardScope
};

struct OffloadPolicy {
  bool to_cpu = false;     // shards, their gradients and therefore the optimizer state are in CPU memory
  bool pin_memory = true;  // page-locked, if there is a CUDA device
};

// After forward: free the gathered parameters, keep them, or keep this rank's part of them among `ranks`
// neighbours, so that the gather of backward uses fewer links. `ranks` divides the size of the shard axis.
struct ReshardTo {
  int ranks;
};
using ReshardAfterForward = std::variant<bool, ReshardTo>;

// Where one parameter is cut, and over which ranks. Constructed from a Shard, from nothing (dim 0), or from a
// Shard and a mesh.
struct ShardChoice {
  ShardChoice() = default;
  ShardChoice(std::nullopt_t) {}
  ShardChoice(Shard shard) : shard(shard) {}
  ShardChoice(const std::optional<Shard>& shard) : shard(shard.value_or(Shard{0})) {}
  ShardChoice(Shard shard, comm::MeshGroups mesh) : shard(shard), mesh(std::move(mesh)) {}

  Shard shard{0};
  // Replaces the mesh passed to fully_shard, for parameters that fewer ranks share, such as those of experts:
  // one axis that shards, or two, the first of which replicates. Gradients are averaged over this mesh alone.
  // Parameters of one module with the same mesh form a group.
  std::optional<comm::MeshGroups> mesh;
};
// Called with the parameter's name and value. All ranks of a returned mesh must return it for the same
// parameters.
using ShardPlacementFunction = std::function<ShardChoice(const std::string& name, const at::Tensor& parameter)>;
// Called with the parameter's name and value; null means that the parameter is gathered without an extension.
using ExtensionFunction = std::function<std::shared_ptr<const AllGatherExtension>(const std::string& name, const at::Tensor& parameter)>;

struct ShardOptions {
  // Default: true, but false for the outermost module, whose parameters backward needs first.
  std::optional<ReshardAfterForward> reshard_after_forward;
  ShardPlacementFunction shard_placement;
  MixedPrecision mixed_precision;
  OffloadPolicy offload;
  ExtensionFunction extension;
  std::vector<at::Tensor> ignored;         // parameters that are not sharded
  // Axes of the mesh, by name. Default: the axis of a one-dim mesh shards; of two axes, the first replicates
  // and the second shards. If names are given, the mesh may have further axes, those of tensor-parallel
  // parameters.
  std::vector<std::string> shard_axes, replicate_axes;
};

}  // namespace penstock
