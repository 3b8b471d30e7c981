// Tensor parallel modules: unmodified torch::nn modules whose parameters become distributed tensors.
//
//   comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, world.rank(), world.size()));
//   parallelize_module(*model, mesh,
//                      {{"blocks.*.attention.w[qkv]", colwise_parallel()},
//                       {"blocks.*.attention.wo", rowwise_parallel({.output = Shard{1}})},      // sequence parallel around it
//                       {"blocks.*.norm*", sequence_parallel()},
//                       {"blocks.*.mlp.up", colwise_parallel()},
//                       {"blocks.*.mlp.down", rowwise_parallel({.output = Shard{1}})}},
//                      {.axis = "tp"});
//   auto y = model->forward(x);
//
// How it works. A style lays out the parameters of a module along one axis of the mesh, replicated along the others, and says
// how the module's input and output lie along that axis. C++ modules have no forward hooks; the layouts are brought about
// where the operator of the module (linear, embedding, layer_norm) takes its weight. All of it is differentiated: where an
// input is gathered, its gradient is reduced and scattered.
//
// Inputs may be distributed tensors of the mesh (their placements along other axes stay) or, on a mesh of one axis, plain
// local parts that lie as `input` says. The output is of the kind that the input was, unless the style says otherwise.
// Parameters' gradients come to the placements of the parameter, reduced where they were partial: optimizers work as they are.
//
// Loss parallel needs nothing: softmax, log_softmax and cross entropy work on logits that are split over classes and send
// one number per row.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/placement.h"

namespace penstock {

enum class BoundaryOutput { AsInput, Local, Distributed };

// What happens at the module's border, along the parallel axis.
struct ModuleBoundary {
  comm::MeshGroups mesh;
  int axis = 0;
  std::optional<Placement> plain_input;    // how a plain input lies; nothing: plain inputs are refused
  std::optional<Placement> desired_input;  // nothing: as it comes
  std::optional<Placement> output;         // nothing: as it comes out
  BoundaryOutput kind = BoundaryOutput::AsInput;
};

// Where a style is to be applied.
struct StyleTarget {
  torch::nn::Module& module;
  std::string name;                        // in the module that is parallelized; empty for itself
  const comm::MeshGroups& mesh;
  int axis;
};

// To write your own: distribute parameters with distribute_parameter and, if inputs or outputs are to be laid out, put a
// ModuleBoundary on one that the module's operator takes as its weight (set_boundary).
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  virtual void apply(const StyleTarget& target) const = 0;
};
using ParallelStylePtr = std::shared_ptr<const ParallelStyle>;

struct ColwiseOptions {
  Placement input = Replicate{};                        // of a plain input
  std::optional<Placement> desired_input = Replicate{};
  std::optional<Placement> output = {};                 // default: as it comes, split along the last dim
  BoundaryOutput kind = BoundaryOutput::AsInput;
};
// Linear: weight and bias split by output features. Embedding: split by embedding dim.
ParallelStylePtr colwise_parallel(const ColwiseOptions& options = {});

struct RowwiseOptions {
  Placement input = Shard{-1};                          // of a plain input; of an Embedding: Replicate
  std::optional<Placement> output = Replicate{};        // Shard{1}: reduce-scatter over the sequence
  BoundaryOutput kind = BoundaryOutput::AsInput;
};
// Linear: weight split by input features, bias replicated; the products are summed over the axis. Embedding: split by
// vocabulary.
ParallelStylePtr rowwise_parallel(const RowwiseOptions& options = {});

struct SequenceOptions {
  std::int64_t dim = 1;                                 // that holds the sequence
  BoundaryOutput kind = BoundaryOutput::AsInput;
};
// Normalizations and other modules that treat positions alike: parameters replicated, activations split along the sequence.
// The input is brought to that layout for LayerNorm; other modules take what comes.
ParallelStylePtr sequence_parallel(const SequenceOptions& options = {});

struct PrepareOptions {
  std::optional<Placement> plain_input = {};
  std::optional<Placement> desired_input = {};
  std::optional<Placement> output = {};
  BoundaryOutput kind = BoundaryOutput::AsInput;
};
// Parameters replicated, input and output laid out as said. For modules that are one operator (Linear, Embedding, LayerNorm);
// in front of a larger module call prepare_layout in the code that calls it.
ParallelStylePtr prepare_module(const PrepareOptions& options);

struct ParallelizeOptions {
  std::string axis = {};  // of the mesh; may be left out for a mesh of one axis
};

// [collective] Applies styles to the modules that match, in the order of the plan. A pattern is a name like "blocks.0.mlp", in
// which * stands for any text without a dot, ? for one character and [abc] for one of several; "" is the module itself. Throws
// ValueError for a pattern that matches nothing, and TypeError for a style that does not know a module.
void parallelize_module(torch::nn::Module& module, const comm::MeshGroups& mesh, const std::vector<std::pair<std::string, ParallelStylePtr>>& plan,
                        const ParallelizeOptions& options = {});

// [collective] Replicates every parameter and buffer that is not distributed yet, so that the module runs on distributed
// tensors of the mesh.
void distribute_module(torch::nn::Module& module, const comm::MeshGroups& mesh);

// [collective] Makes a parameter (or buffer) distributed where it stands: every handle to it sees that. Its gradients come to
// these placements. One that is distributed this way already stays as it is; another way is a StateError.
void distribute_parameter(const at::Tensor& parameter, const comm::MeshGroups& mesh, const Placements& placements);

// Puts a boundary on a distributed parameter.
void set_boundary(const at::Tensor& parameter, ModuleBoundary boundary);

// Brings an activation to a layout along one axis of a mesh, as a style would: a plain one counts as lying as `from`.
at::Tensor prepare_layout(const at::Tensor& activation, const comm::MeshGroups& mesh, const Placement& from, const Placement& to,
                          const std::string& axis = {});

}  // namespace penstock
