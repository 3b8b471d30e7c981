// Sharded parameters: each rank keeps its part of every parameter, gradient and optimizer state, and whole parameters exist only
// while they are computed with.
//
//   auto world = comm::World::from_env();
//   comm::MeshGroups mesh(world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size()));
//   auto model = std::make_shared<Model>();
//   for (const auto& block : *model->blocks) fully_shard(*block, mesh);     // inner modules first: a group of parameters each
//   fully_shard(*model, mesh);                                              // what is left
//   AdamW optimizer(decay_groups(model->named_parameters()), {.lr = 3e-4});
//   for (const Batch& batch : batches) {
//     const at::Tensor loss = model->forward(batch.x).loss(batch.y);        // each block is gathered when it begins
//     loss.backward();                                                      // and again; gradients are averaged over the ranks
//     optimizer.step();                                                     // on the shards
//     optimizer.zero_grad();
//   }
//
// How it works. The parameters of a module stay the tensor objects they were: members, optimizers and ties see them change. Sharded,
// a parameter is a distributed tensor (dtensor.h) of its full size; gathered, it is a plain one. The first operator that computes
// with a parameter gathers its group, in one collective (trigger.h says which operators these are). When another group's turn
// comes it is freed; its memory, not its tensors, so that what autograd saved is good again when backward gathers it once
// more. Backward reduces a group's gradients, in one collective, when they have all come, while it goes on with the next.
//
//   mesh                        parameters                           gradients
//   [dp]                        sharded over dp                      reduce-scatter
//   [replicas, dp]              sharded over dp, repeated (HSDP)     reduce-scatter, then all-reduce
//   replicate(), [dp]           repeated (DDP)                       all-reduce
//
// Parameters that are distributed already (parallel_style.h) are sharded further, as strided shards on the joint mesh.
// Dims that do not divide are fine, on any dim; so are ties, also between groups, frozen parameters and ones that are not used.
// What ranks must have alike is checked at the first forward.
//
// SPMD: all ranks of the mesh call the functions here, forward, backward and step in the same order.
// Thread rule: as for the module. More: docs/sharding.md; settings after the call: shard_state.h; scopes: forward_scope.h.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/mesh_groups.h"
#include "penstock/shard/pieces/policies.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/random.h"

namespace penstock {

// Makes the parameters of the module and of what is inside it, apart from those that an earlier call took, one group. Each rank
// takes its part of the values it has: they should be equal on all ranks. No communication.
// Throws ValueError for a mesh, dim or device that does not fit, StateError for a module that is sharded or whose parameters an outer
// module has taken.
std::shared_ptr<ShardState> fully_shard(torch::nn::Module& module, const comm::MeshGroups& mesh, const ShardOptions& options = {});

// The same without cutting: every rank keeps all of each parameter, gradients are averaged in one all-reduce for each group.
std::shared_ptr<ShardState> replicate(torch::nn::Module& module, const comm::MeshGroups& mesh, const ShardOptions& options = {});

// Null for a module that was not given to fully_shard itself.
ShardState* shard_state_of(const torch::nn::Module& module);

// What is known of a parameter: its group, its specs and sizes. Nothing for a tensor that is not a sharded parameter.
struct ShardInfo {
  ShardGroup* group = nullptr;
  std::size_t index = 0;  // in the group

  const ShardedParameter& parameter() const { return group->parameters()[index]; }
  ShardGroupState state() const { return group->state(); }
};
std::optional<ShardInfo> shard_of(const at::Tensor& parameter);

// Frees what is still gathered of these, so that they are shards: before an optimizer steps or a checkpoint reads them.
void ensure_sharded(const std::vector<at::Tensor>& parameters);
void ensure_sharded(const at::Tensor& parameter);

// After a load that put new tensors in the place of shards: takes them over. A second call does nothing. New data of a parameter
// (set_data) and new tensor objects in the module's table of parameters are both found. An object becomes the parameter: it is sharded
// where it stands, from a whole value that is equal on all ranks or a distributed one that lies as the shard or as the parameter before
// fully_shard; requires_grad is its own. Optimizers and members that hold the old object must be given the new one.
// Throws ValueError for another shape or layout, StateError for a group that is gathered.
void reset_sharded_parameters(torch::nn::Module& module);

// This rank's part of a whole value that it has, written into the shard. Throws ValueError for another shape.
void load_whole(const at::Tensor& parameter, const at::Tensor& whole);

// Gives memory and values to a module that was built fake (deferred_init.h) and then sharded: `fill(name, shard, box)` is called
// for this rank's part of every parameter, which begins at box.offset of the whole; keyed_init.h gives the same values for any
// layout. No rank holds a whole parameter at any time. `device`: where; default: as declared.
void materialize_shards(torch::nn::Module& module, const ShardGroup::ShardInitializer& fill, std::optional<at::Device> device = std::nullopt);

}  // namespace penstock
