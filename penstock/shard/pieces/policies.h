// What may be chosen about sharding, apart from the mesh. Values.
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

// Parameters that are not floating point keep their dtype. "Nothing" means: as the parameter is, no cast.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype;   // of the gathered parameter, and of what is sent
  std::optional<at::ScalarType> reduce_dtype;  // of gradients that are reduced; default: as they come
  std::optional<at::ScalarType> output_dtype;  // of what ForwardScope::output returns
  bool cast_forward_inputs = true;             // floating point inputs of the operators that take a parameter, and of ForwardScope
};

struct OffloadPolicy {
  bool to_cpu = false;     // shards, their gradients and so the optimizer live in CPU memory
  bool pin_memory = true;  // page-locked, where there is a CUDA device
};

// After forward: free the gathered parameters, keep them, or keep this rank's part of them among `ranks` neighbours, so that the
// gather of backward crosses fewer links. `ranks` divides the size of the shard axis.
struct ReshardTo {
  int ranks;
};
using ReshardAfterForward = std::variant<bool, ReshardTo>;

// Where one parameter is cut, and over which ranks. Made from a Shard, from nothing (dim 0), or from a Shard and a mesh.
struct ShardChoice {
  ShardChoice() = default;
  ShardChoice(std::nullopt_t) {}
  ShardChoice(Shard shard) : shard(shard) {}
  ShardChoice(const std::optional<Shard>& shard) : shard(shard.value_or(Shard{0})) {}
  ShardChoice(Shard shard, comm::MeshGroups mesh) : shard(shard), mesh(std::move(mesh)) {}

  Shard shard{0};
  // Instead of the mesh given to fully_shard, for parameters that fewer ranks share, like those of experts: one axis that shards, or two,
  // the first of which replicates. Gradients are averaged over this mesh alone. Parameters of one module with the same mesh form a group.
  std::optional<comm::MeshGroups> mesh;
};
// Called with the parameter's name and value. All ranks of the mesh it returns must return it for the same parameters.
using ShardPlacementFunction = std::function<ShardChoice(const std::string& name, const at::Tensor& parameter)>;
// Called with the parameter's name and value; null means that it is gathered as it is.
using ExtensionFunction = std::function<std::shared_ptr<const AllGatherExtension>(const std::string& name, const at::Tensor& parameter)>;

struct ShardOptions {
  // Default: true, and false for the outermost module, whose parameters backward needs first.
  std::optional<ReshardAfterForward> reshard_after_forward;
  ShardPlacementFunction shard_placement;
  MixedPrecision mixed_precision;
  OffloadPolicy offload;
  ExtensionFunction extension;
  std::vector<at::Tensor> ignored;         // parameters that stay as they are
  // Axes of the mesh, by name. Default: of a mesh of one axis it shards; of two, the first replicates and the second shards. With
  // names the mesh may have further axes, those of tensor parallel parameters.
  std::vector<std::string> shard_axes, replicate_axes;
};

}  // namespace penstock
