// Sharded parameters (FSDP, HSDP, DDP): each rank keeps its part of every parameter, gradient and optimizer
// state, and whole parameters exist only while they are computed with.
//
//   auto world = comm::World::from_env();
//   const DeviceMesh ranks = init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size());
//   comm::MeshGroups mesh(world, ranks);
//   torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::Linear(32, 1));
//   for (const auto& layer : model->children()) fully_shard(*layer, mesh);  // inner modules first
//   fully_shard(*model, mesh);                                              // the other parameters, if any
//   std::vector<optim::NamedParameter> named;
//   for (const auto& item : model->named_parameters()) named.push_back({item.key(), item.value()});
//   optim::AdamW optimizer(optim::decay_groups(named), {.lr = 3e-4});
//   model->forward(torch::randn({4, 8})).sum().backward();  // gathers layer by layer, averages the gradients
//   optimizer.step();                                       // on the shards
//   optimizer.zero_grad();
//
// The parameters of a module remain the same tensor objects: members, optimizers and ties see them change.
// Sharded, a parameter is a distributed tensor (dtensor.h) of its full size; gathered, it is a plain one. The
// first operator that computes with a parameter gathers its group, in one collective. When another group is
// used it is freed: its memory, not its tensors, so that what autograd saved is valid again when backward
// gathers it once more. Backward reduces a group's gradients in one collective when all of them have arrived,
// while it continues with the next group.
//
//   mesh                        parameters                           gradients
//   [dp]                        sharded over dp                      reduce-scatter
//   [replicas, dp]              sharded over dp, repeated (HSDP)     reduce-scatter, then all-reduce
//   replicate(), [dp]           repeated (DDP)                       all-reduce
//
// Parameters that are already distributed (tensor_parallel.h) are sharded further, as strided shards on the
// joint mesh. Dims that do not divide evenly are supported, on any dim; so are ties, also between groups,
// frozen parameters and unused ones. The first forward checks that the ranks have the same parameters.
//
// [collective]: all ranks of the mesh call the functions here, forward, backward and step in the same order.
// Thread safety: that of the module. More: docs/sharding.md; scopes: fully_shard.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/nn/module.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/random.h"
#include "penstock/shard_options.h"
#include "penstock/world.h"

namespace penstock {

class ShardState;

// Makes one group of the parameters of the module and of the modules inside it, except those that an earlier
// call took. Each rank takes its part of the values it has: they should be equal on all ranks. No
// communication. Throws ValueError for a mesh, dim or device that does not fit, StateError for a module
// that is already sharded or whose parameters an outer module has taken.
std::shared_ptr<ShardState> fully_shard(torch::nn::Module& module, const comm::MeshGroups& mesh,
                                        const ShardOptions& options = {});

// The same without cutting: every rank keeps all of each parameter, and gradients are averaged in one
// all-reduce for each group. Throws as fully_shard does, and ValueError for options that say how to cut.
std::shared_ptr<ShardState> replicate(torch::nn::Module& module, const comm::MeshGroups& mesh,
                                      const ShardOptions& options = {});

// Returns the state of a module that was passed to fully_shard or replicate; null for any other module.
// Valid as long as the module's parameters.
ShardState* shard_state_of(const torch::nn::Module& module);

// The time sharding takes on the threads that run the model. Work that overlaps with compute is not
// included. On a device these are host times: copies and waits are only enqueued.
struct ShardTimes {
  std::chrono::nanoseconds gather{};  // starting gathers and waiting for them
  std::chrono::nanoseconds reduce{};  // starting reductions and waiting for them
  std::chrono::nanoseconds copy{};    // between parameters or gradients and communication buffers
};

// The sharding state of a module: its place among other sharded modules, and its settings.
//
//   std::shared_ptr<ShardState> state = fully_shard(*layer, mesh);
//   state->set_requires_gradient_sync(false);   // accumulate: gradients stay whole on this rank
//   state->set_requires_gradient_sync(true);    // the next backward reduces the sum
//
// A state lives at least as long as the parameters of its module. Settings apply to the module and, unless
// `recurse` is false, to all sharded modules inside it.
// Thread safety: that of the module.
class ShardState : public std::enable_shared_from_this<ShardState> {
 public:
  ~ShardState();
  ShardState(const ShardState&) = delete;
  ShardState& operator=(const ShardState&) = delete;

  // The outermost sharded module that contains this one, or this one.
  ShardState& root();
  // Whether `other` is a sharded module inside this one.
  bool contains(const ShardState& other) const;
  // This one and all sharded modules inside it, in registration order.
  const std::vector<ShardState*>& all_states() const;

  // [collective] Starts the gather of this module's own parameters and, if `async` is false, waits for it.
  // Otherwise wait_for_unshard or the first use waits.
  void unshard(bool async = false);
  // Waits for the gather of this module's own parameters.
  void wait_for_unshard();
  // Frees this module's own gathered parameters.
  void reshard();

  // If false, gradients are kept whole and accumulated; the next backward with true reduces the sum.
  void set_requires_gradient_sync(bool value, bool recurse = true);
  // If false, HSDP accumulates shards reduced over the shard axis alone; the next backward with true reduces
  // over replicas.
  void set_requires_all_reduce(bool value, bool recurse = true);
  // If false, parameters stay gathered after backward, for the next forward.
  void set_reshard_after_backward(bool value, bool recurse = true);
  // If false, parameters stay gathered between forward and backward.
  void set_reshard_after_forward(bool value, bool recurse = true);
  // If false, backward ends without waiting for its reductions; the next one waits.
  void set_is_last_backward(bool value);
  // Gradients are summed over the data-parallel ranks and divided by this factor instead of the number of
  // ranks. A parameter that is itself distributed over the data-parallel axes has a single gradient, that of
  // the whole distributed batch; it is divided by this factor. Throws ValueError unless the factor is above
  // 0.
  void set_gradient_divide_factor(double factor, bool recurse = true);
  // [collective] Replaces the end of backward, for a pipeline schedule: every group under this module
  // reshards and starts its reduction. Call final_callback afterwards.
  void post_backward();
  // Waits for the reductions that post_backward started.
  void final_callback();

  // Gathers these modules when forward uses this one. Throws ValueError for a module under another root,
  // StateError if this module has no parameters of its own.
  void set_modules_to_forward_prefetch(const std::vector<ShardState*>& states);
  // The same for backward.
  void set_modules_to_backward_prefetch(const std::vector<ShardState*>& states);
  // Whether, without a list, the order of the last forward decides what is gathered ahead. On by default;
  // applies to the whole root.
  void set_automatic_prefetch(bool value);

  // Whether gathers and reductions run on separate CUDA streams, beside the computation. On by default;
  // applies to the whole root.
  void set_own_streams(bool value);
  // The stream of gathers, for profilers; std::nullopt on the CPU, before the first forward and if
  // set_own_streams is off.
  std::optional<c10::Stream> gather_stream();
  // The stream of reductions, likewise.
  std::optional<c10::Stream> reduce_stream();

  // The maximum number of bytes of gathered parameters and buffers since the last reset_peak, for the whole
  // root.
  std::int64_t peak_gathered_bytes();
  // Starts a new measurement of the peak.
  void reset_peak();
  // How many communication buffers were allocated so far, for the whole root: constant once training is
  // steady.
  std::size_t pool_allocations();
  // The times since the last reset_times, for the whole root. Zero before the first forward.
  ShardTimes times();
  // Starts a new measurement of the times.
  void reset_times();

 private:
  friend struct ShardStateAccess;
  struct Impl;
  explicit ShardState(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// Frees whatever of these parameters is still gathered, so that they are shards: call it before reading or
// writing shards. Optimizers and checkpoints of Penstock do. Ignores tensors that are not sharded parameters.
void ensure_sharded(const std::vector<at::Tensor>& parameters);
// The same for one parameter.
void ensure_sharded(const at::Tensor& parameter);

// After a load that put new tensors in the place of shards: adopts them. A second call does nothing. Finds
// both new data of a parameter (set_data) and new tensor objects in the module's table of parameters. A new
// object becomes the parameter: it is sharded in place, from a whole value that is equal on all ranks or a
// distributed one that is placed like the shard or like the parameter before fully_shard; it keeps its own
// requires_grad. Optimizers and members that hold the old object must be given the new one.
// Throws ValueError for another shape or layout, StateError for a group that is gathered.
void reset_sharded_parameters(torch::nn::Module& module);

// Writes this rank's part of a whole value into the shard of a parameter. No communication. Throws
// ValueError for another shape, TypeError for a tensor that is not a sharded parameter.
void load_whole(const at::Tensor& parameter, const at::Tensor& whole);

// Fills `shard`, this rank's part of the parameter `name`, which begins at box.offset of the whole parameter.
// The keyed random functions (random.h) take the box and return the same values for any layout.
using ShardInitializer =
    std::function<void(const std::string& name, const at::Tensor& shard, const GlobalBox& box)>;

// Allocates and initializes a module that was built fake (fake.h) and then sharded: calls `fill` for
// this rank's part of every parameter. No rank holds a whole parameter at any time. `device`: where to
// allocate; default: the declared device.
void materialize_shards(torch::nn::Module& module, const ShardInitializer& fill,
                        std::optional<at::Device> device = std::nullopt);

// ---- casts at the borders of a module ----
//
// Scopes during which the parameters of a sharded module (fully_shard.h) are gathered.
//
//   struct Block : torch::nn::Module {
//     torch::nn::Linear up = register_module("up", torch::nn::Linear(8, 8));
//     at::Tensor forward(const at::Tensor& x) {
//       const ForwardScope scope(*this);                 // gathers this block, casts, frees at the end
//       const at::Tensor h = scope.input(x);
//       return scope.output(h + up(h));
//     }
//   };
//
// A module does not need a scope: operators gather the parameters they use. With a scope the group is freed
// exactly where the module ends instead of where the next begins, and inputs and outputs of the module as a
// whole are cast. In a module that is not sharded a scope does nothing.
// Thread safety: that of the module.

// Gathers a sharded module for the duration of its forward.
class ForwardScope {
 public:
  // [collective] Waits for the gather of the module's own parameters.
  explicit ForwardScope(const torch::nn::Module& module);
  // Frees, keeps, or keeps a part of the parameters, as ShardOptions::reshard_after_forward says.
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  // Casts an input of the module to MixedPrecision::param_dtype; differentiable. Returns tensors that are not
  // floating point, and all tensors if the option cast_forward_inputs is off, unchanged.
  at::Tensor input(const at::Tensor& tensor) const;
  // Casts an output of the module to MixedPrecision::output_dtype; differentiable. Returns tensors that are
  // not floating point unchanged.
  at::Tensor output(const at::Tensor& tensor) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null if the module is not sharded
};

// Makes the whole parameters of a module and of all sharded modules inside it available for reading and
// writing: every rank must write the same values. Scopes can be nested, of the same module or of one inside
// it; the shards are written at the end of the outermost scope of a group.
class UnshardedScope {
 public:
  // [collective] Throws StateError if the module was not given to fully_shard.
  explicit UnshardedScope(const torch::nn::Module& module);
  // Copies this rank's part of the written values into the shards and frees the rest. No communication.
  // If parameters are gathered in another dtype (MixedPrecision::param_dtype) or by an extension, the scope
  // shows rounded values; elements that still have them at its end keep the exact values of the shards.
  ~UnshardedScope();
  UnshardedScope(const UnshardedScope&) = delete;
  UnshardedScope& operator=(const UnshardedScope&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
