// Distributed tensors: one logical tensor split or replicated over the ranks of a mesh, which works with
// ordinary operators, torch::nn modules, autograd and optimizers.
//
//   comm::MeshGroups grid = world.mesh("cpu", {{"dp", 2}, {"tp", 2}});
//   auto input = distribute_tensor(torch::randn({8, 16}), grid, {Shard{0}, Replicate{}});     // rows over dp
//   auto weight = distribute_tensor(torch::randn({32, 16}), grid, {Replicate{}, Shard{0}});   // rows over tp
//   auto product = torch::linear(input, weight);                    // [8, 32] as [S(0), S(1)], no transfer
//   auto gathered = redistribute(product, {Shard{0}, Replicate{}});  // an all-gather over tp
//   auto whole = full_tensor(gathered);                              // a plain [8, 32] on every rank
//
// sizes(), strides(), dtype and device of a distributed tensor are those of the whole tensor. All ranks of
// the mesh run the same operators in the same order, on tensors with the same shapes and placements.
//
// For each operator a rule (docs/dtensor.md lists them) selects the cheapest layout of the inputs; those that
// are laid out differently are redistributed, and the operator runs on the local parts. The result is that of
// one process, up to the order of summation.
//
// Autograd works through all functions below. Gradients are distributed tensors; their placements are those
// that the backward operators produce (often Partial for a replicated parameter), unless a function below
// specifies them.
//
// A plain tensor with one or more dims cannot be mixed with distributed tensors in one operator; numbers and
// tensors without dims count as replicated. ImplicitReplicationGuard permits it for a scope, for masks and
// positions that are equal on every rank. It is permitted in backward too, where derivatives create such
// tensors themselves.
//
// [collective] marks functions that all ranks of the mesh call.
//
// Thread safety: as for tensors and groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/placement.h"
#include "penstock/world.h"

namespace penstock {

// Options of distribute_tensor.
struct DistributeOptions {
  // Position along each axis of the mesh of the rank whose values are used. std::nullopt: all ranks have
  // equal values, and nothing is sent.
  std::optional<int> source_axis_rank = 0;
};

// [collective] Distributes a tensor. Every rank passes a tensor of the same shape and dtype; with a source,
// only the values of the source are used. The result is a leaf with the requires_grad of `tensor` and does
// not share its memory. Throws ValueError for invalid placements and for Partial (use from_local), TypeError
// for a tensor that is already distributed.
at::Tensor distribute_tensor(const at::Tensor& tensor, const comm::MeshGroups& mesh,
                             const Placements& placements, const DistributeOptions& options = {});

// Options of from_local.
struct FromLocalOptions {
  // Shape of the whole tensor. Default: the local shape multiplied by the sizes of the mesh axes that split
  // each dim, which is correct for even shards only.
  std::optional<std::vector<std::int64_t>> shape;
  // Strides of the whole tensor. Default: dense, in the order of the local strides.
  std::optional<std::vector<std::int64_t>> stride;
  // Whether to compare the arguments of all ranks, which communicates. Default: at debug level "detail".
  std::optional<bool> check;
};

// Makes one tensor of the local parts of all ranks, without moving values; [collective] only with the check.
// Differentiable: the gradient of `local` is a plain tensor, the local part of the gradient in these
// placements, with Replicate instead of Partial. Throws ValueError if `local` does not have the shape of this
// rank's part, TypeError if it is distributed.
at::Tensor from_local(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});

// Options of to_local and full_tensor.
struct ToLocalOptions {
  // How the gradients of the local parts form the gradient of the whole. Default: the placements of the
  // tensor, with Replicate instead of Partial. Use Partial for a replicated tensor whose local parts are used
  // differently on each rank.
  std::optional<Placements> grad_placements;
};

// Returns the local part of this rank. It is connected to the graph and shares memory with the tensor. May
// communicate in backward only. Throws TypeError for a plain tensor.
at::Tensor to_local(const at::Tensor& tensor, const ToLocalOptions& options = {});

// Options of redistribute.
struct RedistributeOptions {
  // Return as soon as the last collective has started; the first use of the values waits for it.
  // Communication of other tensors may be started meanwhile, in the same order on all ranks.
  bool async = false;
};

// [collective] Returns the tensor in other placements, by the cheapest sequence of collectives; the tensor
// itself if it already has them. Backward redistributes the gradient to the placements of `tensor`, with
// Replicate instead of Partial. Throws TypeError for a plain tensor, ValueError for invalid placements.
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        const RedistributeOptions& options = {});

// [collective] Returns the whole tensor as a plain tensor on every rank. Throws TypeError for a plain tensor.
at::Tensor full_tensor(const at::Tensor& tensor, const ToLocalOptions& options = {});

// ---- properties ----

// Returns whether a tensor is distributed.
bool is_dtensor(const at::Tensor& tensor);
// Returns the placements of a distributed tensor, one per mesh axis. Throws TypeError for a plain tensor.
const Placements& placements_of(const at::Tensor& tensor);
// Returns the mesh of a distributed tensor. Throws TypeError for a plain tensor.
const comm::MeshGroups& mesh_of(const at::Tensor& tensor);
// Returns the shape of this rank's part. Throws TypeError for a plain tensor.
std::vector<std::int64_t> local_shape_of(const at::Tensor& tensor);
// Returns a text without values, such as "DTensor(float32[8, 16] as [S(0), R], local [4, 16] at (0, 1) of
// DeviceMesh(...))". Does not communicate. Throws TypeError for a plain tensor.
std::string describe_dtensor(const at::Tensor& tensor);

// Returns a text drawing of which rank holds which part of a distributed tensor. Does not communicate and
// shows no values. Throws TypeError for a plain tensor.
std::string draw_sharding_text(const at::Tensor& tensor);
// The same as an SVG picture.
std::string draw_sharding_svg(const at::Tensor& tensor);

// Returns a description of the collectives that redistribute(tensor, placements) would run, with their sizes.
// Does not communicate. Throws TypeError for a plain tensor, ValueError for placements that do not fit.
std::string describe_redistribution(const at::Tensor& tensor, const Placements& placements);

// Treats plain tensors that are mixed with distributed ones as replicated, in a scope of this thread. Every
// rank must have equal values.
class ImplicitReplicationGuard {
 public:
  // Begins the scope.
  ImplicitReplicationGuard();
  // Restores the previous setting.
  ~ImplicitReplicationGuard();
  ImplicitReplicationGuard(const ImplicitReplicationGuard&) = delete;
  ImplicitReplicationGuard& operator=(const ImplicitReplicationGuard&) = delete;
  // Returns whether this thread is in such a scope.
  static bool active();

 private:
  bool before_;
};

}  // namespace penstock
