// Tensor parallelism: unmodified torch::nn modules whose parameters become distributed tensors.
//
//   comm::MeshGroups tp = world.mesh("cpu", {{"tp", world.size()}});
//   torch::nn::Sequential mlp(torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Linear(256, 64));
//   parallelize_module(*mlp, tp, {{"0", colwise_parallel()}, {"2", rowwise_parallel()}});
//   at::Tensor out = mlp->forward(x);                     // plain input, plain output
//   comm::MeshGroups grid = world.mesh("cpu", {{"dp", 2}, {"tp", world.size() / 2}});
//   parallelize_module(*model, grid,
//                      {{"blocks.*.attention.w[qkv]", colwise_parallel()},
//                       {"blocks.*.attention.wo", rowwise_parallel({.output = Shard{1}})},
//                       {"blocks.*.norm*", sequence_parallel()},   // activations split along dim 1
//                       {"blocks.*.mlp.up", colwise_parallel()},
//                       {"blocks.*.mlp.down", rowwise_parallel({.output = Shard{1}})}},
//                      {.axis = "tp"});
//
// A style distributes the parameters of a module along one axis of the mesh (replicated along the others) and
// defines how its input and output are laid out along that axis. Because C++ modules have no forward hooks,
// inputs and outputs are redistributed at the operator (linear, embedding, layer_norm) that takes the weight
// of the module. All of this is differentiable: the gradient of a gathered input is reduced and scattered.
//
// Inputs are distributed tensors of the mesh, whose placements along the other axes are kept, or, on a mesh
// with a single axis, plain local parts that are laid out as the style says. The output is plain if the input
// was, unless the style says otherwise. Gradients of parameters have the placements of their parameters, so
// optimizers work unchanged.
//
// Loss parallelism needs no style: softmax, log_softmax and cross entropy accept logits that are split over
// the classes and communicate one number per row.
//
// [collective] marks functions that all ranks of the mesh call.
//
// Thread safety: one thread parallelizes a module. Parallelized modules are used as distributed tensors are.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/placement.h"
#include "penstock/world.h"

namespace penstock {

// What a parallelized module returns.
enum class BoundaryOutput {
  AsInput,     // a plain local part if the input was plain, else a distributed tensor
  Local,       // a plain local part
  Distributed  // a distributed tensor
};

// How the input and output of a module are laid out along the parallel axis. Inputs are converted before the
// operator that takes the module's weight, outputs after it.
struct ModuleBoundary {
  comm::MeshGroups mesh;                          // mesh of the parameter
  int axis = 0;                                   // index of the parallel axis
  std::optional<Placement> plain_input;           // placement of a plain input; empty: TypeError for those
  std::optional<Placement> desired_input;         // the input is brought to this; empty: used as it is
  std::optional<Placement> output;                // the output is brought to this; empty: returned as it is
  BoundaryOutput kind = BoundaryOutput::AsInput;  // whether the output is plain

  // Whether all members are equal.
  friend bool operator==(const ModuleBoundary&, const ModuleBoundary&) = default;
};

// What a style is applied to.
struct StyleTarget {
  torch::nn::Module& module;     // the module
  std::string name;              // its name in the parallelized module; empty for that module itself
  const comm::MeshGroups& mesh;  // the mesh
  int axis;                      // index of the parallel axis
};

// How a module is parallelized. To write your own, distribute parameters by distribute_parameter. To convert
// inputs or outputs, also set a ModuleBoundary (set_boundary) on the parameter that the operator of the
// module takes as its weight.
class ParallelStyle {
 public:
  // Styles are deleted through this class.
  virtual ~ParallelStyle() = default;
  // [collective] Parallelizes a module. Throws TypeError for a module that the style does not support.
  virtual void apply(const StyleTarget& target) const = 0;
};
// Shared ownership of a style.
using ParallelStylePtr = std::shared_ptr<const ParallelStyle>;

// Options of colwise_parallel.
struct ColwiseOptions {
  Placement input = Replicate{};                         // placement of a plain input
  std::optional<Placement> desired_input = Replicate{};  // the input is brought to this; empty: used as it is
  std::optional<Placement> output = {};                  // the output is brought to this; empty: Shard{-1}
  BoundaryOutput kind = BoundaryOutput::AsInput;         // whether the output is plain
};
// Returns a style for Linear (weight and bias split by output features) and Embedding (split by embedding
// dim).
ParallelStylePtr colwise_parallel(const ColwiseOptions& options = {});

// Options of rowwise_parallel.
struct RowwiseOptions {
  Placement input = Shard{-1};                    // placement of a plain input; Embedding: always Replicate
  std::optional<Placement> output = Replicate{};  // Shard{1}: a reduce-scatter over the sequence
  BoundaryOutput kind = BoundaryOutput::AsInput;  // whether the output is plain
};
// Returns a style for Linear (weight split by input features, bias replicated, products summed over the axis)
// and Embedding (split by vocabulary).
ParallelStylePtr rowwise_parallel(const RowwiseOptions& options = {});

// Options of sequence_parallel.
struct SequenceOptions {
  std::int64_t dim = 1;                           // the dim of the sequence
  BoundaryOutput kind = BoundaryOutput::AsInput;  // whether the output is plain
};
// Returns a style for normalizations and other modules that treat all positions alike: parameters are
// replicated, activations split along the sequence. The input of a LayerNorm is redistributed to that layout;
// other modules use it as it is. Applying it to a LayerNorm without weight throws TypeError.
ParallelStylePtr sequence_parallel(const SequenceOptions& options = {});

// Options of prepare_module.
struct PrepareOptions {
  std::optional<Placement> plain_input = {};      // placement of a plain input; empty: TypeError for those
  std::optional<Placement> desired_input = {};    // the input is brought to this; empty: used as it is
  std::optional<Placement> output = {};           // the output is brought to this; empty: returned as it is
  BoundaryOutput kind = BoundaryOutput::AsInput;  // whether the output is plain
};
// Returns a style that replicates the parameters and redistributes input and output. For modules that are a
// single operator with a weight (Linear, Embedding, LayerNorm); for larger modules call prepare_layout in the
// code that calls them.
ParallelStylePtr prepare_module(const PrepareOptions& options);

// Options of parallelize_module.
struct ParallelizeOptions {
  std::string axis = {};  // name of the parallel axis; may be empty for a mesh with a single axis
};

// [collective] Applies styles to the submodules that match, in the order of the plan. A pattern is a name
// such as "blocks.0.mlp", in which * matches any text without a dot, ? one character and [abc] one of
// several; "" is the module itself. Throws ValueError, before anything is changed, for a pattern without a
// match or an unknown axis; TypeError for a style that does not support a module.
void parallelize_module(torch::nn::Module& module, const comm::MeshGroups& mesh,
                        const std::vector<std::pair<std::string, ParallelStylePtr>>& plan,
                        const ParallelizeOptions& options = {});

// [collective] Replicates every parameter and buffer that is not distributed yet, so that the module runs on
// distributed tensors of the mesh.
void distribute_module(torch::nn::Module& module, const comm::MeshGroups& mesh);

// [collective] Makes a parameter or buffer distributed in place, for every handle to it, with the values of
// the first rank along each axis. Gradients are redistributed to these placements. Does nothing if it is
// already distributed in this way; throws StateError if it is distributed in another way.
void distribute_parameter(const at::Tensor& parameter, const comm::MeshGroups& mesh,
                          const Placements& placements);

// Sets the boundary of the module that uses this parameter. Throws TypeError for a plain tensor, ValueError
// for a different mesh or an axis out of range.
void set_boundary(const at::Tensor& parameter, ModuleBoundary boundary);

// [collective] Returns an activation as a distributed tensor with placement `to` along one axis of the mesh,
// as a style would. A plain activation is treated as placed as `from`; this needs a mesh with a single axis.
// `axis` may be empty for such a mesh. Throws ValueError for a missing or unknown axis or a tensor of a
// different mesh, TypeError for a plain activation on a mesh with several axes.
at::Tensor prepare_layout(const at::Tensor& activation, const comm::MeshGroups& mesh, const Placement& from,
                          const Placement& to, const std::string& axis = {});

}  // namespace penstock
