// Distributed tensors: one logical tensor spread over the ranks of a mesh, which flows through ordinary operators,
// torch::nn modules, autograd and optimizers.
//
//   auto world = comm::World::from_env();
//   comm::MeshGroups mesh(world, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world.rank(), world.size()));
//   auto x = distribute_tensor(torch::randn({8, 16}), mesh, {Shard{0}, Replicate{}});      // rows over dp
//   auto w = distribute_tensor(torch::randn({32, 16}), mesh, {Replicate{}, Shard{0}});     // rows over tp
//   auto y = torch::linear(x, w);                    // [8, 32] as [S(0), S(1)]: nothing was sent
//   auto z = redistribute(y, {Shard{0}, Replicate{}});                                      // an all-gather over tp
//   auto whole = full_tensor(z);                     // a plain [8, 32] on every rank
//
// Semantics
// - sizes(), strides(), dtype and device of a distributed tensor are those of the whole tensor.
// - SPMD: all ranks of the mesh run the same operators in the same order on tensors of equal specs.
// - An operator finds the cheapest layout for its inputs by its rule (docs/dtensor.md lists them), redistributes what must
//   be, and runs on the local parts. The result is that of one process, up to the order of sums.
// - Autograd goes through everything here. Gradients are distributed tensors; their placements are what the backward
//   operators give (often Partial for a replicated parameter) unless a function below says otherwise.
// - A plain tensor with dims in an operator with distributed ones is an error; numbers and tensors without dims count as
//   replicated. ImplicitReplicationGuard lifts that for a scope, for masks and positions that every rank has. In backward
//   it is lifted, too: derivatives make such tensors themselves.
//
// Thread rule: as for tensors and groups. Functions marked [collective] are called by all ranks of the mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/placement.h"

namespace penstock {

struct DistributeOptions {
  // The rank, along each axis of the mesh, whose values count. Nothing: every rank gives equal values, none are sent.
  std::optional<int> source_axis_rank = 0;
};

// [collective] Spreads a tensor that every rank has (or, with a source, only the source's values matter; shape and dtype are
// needed everywhere). requires_grad carries over and the result is a leaf. Throws ValueError for bad placements and for
// Partial: terms come from from_local.
at::Tensor distribute_tensor(const at::Tensor& tensor, const comm::MeshGroups& mesh, const Placements& placements,
                             const DistributeOptions& options = {});

struct FromLocalOptions {
  // Of the whole tensor. Nothing: the local shape times the mesh axes that split each dim, which is right for even shards.
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::vector<std::int64_t>> stride;  // default: that of the local part, scaled
  // Compares shapes over all ranks, which communicates. Default: at debug level detail.
  std::optional<bool> check;
};

// Makes local parts one tensor; no values move. Differentiable: the gradient comes back in these placements (replicated where
// they are Partial), as a plain local tensor. [collective] only with the check.
at::Tensor from_local(const at::Tensor& local, const comm::MeshGroups& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});

struct ToLocalOptions {
  // How the gradients of the local parts form the gradient of the whole. Default: as the tensor is placed, and replicated
  // where that is Partial. A replicated tensor whose local parts go separate ways on each rank wants Partial here.
  std::optional<Placements> grad_placements;
};

// This rank's part, connected to the graph and sharing memory. Communicates only in backward, if at all.
at::Tensor to_local(const at::Tensor& tensor, const ToLocalOptions& options = {});

struct RedistributeOptions {
  // Returns when the last collective has started; who first needs the values waits. The communication of other tensors may
  // be started meanwhile, in the same order on all ranks.
  bool async = false;
};

// [collective] The same tensor in other placements, by the cheapest sequence of collectives. Backward redistributes the
// gradient to the placements of `tensor`, replicated where those are Partial.
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements, const RedistributeOptions& options = {});

// [collective] The whole tensor as a plain one, on every rank.
at::Tensor full_tensor(const at::Tensor& tensor, const ToLocalOptions& options = {});

// ---- questions; TypeError for a plain tensor ----

bool is_dtensor(const at::Tensor& tensor);
const Placements& placements_of(const at::Tensor& tensor);
const comm::MeshGroups& mesh_of(const at::Tensor& tensor);
std::vector<std::int64_t> local_shape_of(const at::Tensor& tensor);
// "DTensor(float32[8, 16] as [S(0), R], local [4, 16] at (0, 1) of DeviceMesh(...))". Communicates nothing, shows no values.
std::string describe_dtensor(const at::Tensor& tensor);

// Plain tensors that meet distributed ones count as replicated in this scope of this thread: every rank must hold equal
// values.
class ImplicitReplicationGuard {
 public:
  ImplicitReplicationGuard();
  ~ImplicitReplicationGuard();
  ImplicitReplicationGuard(const ImplicitReplicationGuard&) = delete;
  ImplicitReplicationGuard& operator=(const ImplicitReplicationGuard&) = delete;
  static bool active();

 private:
  bool before_;
};

}  // namespace penstock
