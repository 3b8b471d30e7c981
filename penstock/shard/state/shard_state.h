// The sharding state of a module: its groups of parameters, its place among other sharded modules, and its
// settings.
//
//   std::shared_ptr<ShardState> state = fully_shard(*model, mesh);    // or shard_state_of(*model) later
//   state->set_requires_gradient_sync(false);                     // accumulate: gradients stay whole here
//   ...
//   state->set_requires_gradient_sync(true);                      // the next backward reduces the sum
//
// A state lives as long as the parameters of its module, regardless of who else holds it. Flags apply to the
// module and, unless specified otherwise, to all sharded modules inside it.
// Thread safety: that of the module.
#pragma once

#include <torch/nn/module.h>

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/shard/state/shard_group.h"
#include "penstock/shard/state/shard_times.h"

namespace penstock {

class ShardState : public std::enable_shared_from_this<ShardState> {
 public:
  ~ShardState();
  ShardState(const ShardState&) = delete;
  ShardState& operator=(const ShardState&) = delete;

  // The first of the module's groups; null if other sharded modules inside hold all parameters.
  ShardGroup* group() const { return groups_.empty() ? nullptr : groups_.front().get(); }
  // The module's own groups: one, or one for each mesh that ShardOptions::shard_placement chose.
  std::vector<ShardGroup*> groups() const;
  // The outermost sharded module that contains this one, or this one.
  ShardState& root();
  bool contains(const ShardState& other) const;  // whether `other` is a sharded module inside this one
  // This one and all sharded modules inside it, in registration order.
  const std::vector<ShardState*>& all_states() const { return subtree_; }
  std::vector<ShardGroup*> all_groups() const;

  // ---- explicit control of this module's own groups ----
  // [collective] Starts the gather and, if async is false, waits for it. Otherwise wait_for_unshard or the
  // first use waits.
  void unshard(bool async = false);
  void wait_for_unshard();
  void reshard();

  // ---- backward ----
  // If false, gradients are kept whole and accumulated; the next backward with true reduces the sum.
  void set_requires_gradient_sync(bool value, bool recurse = true);
  // If false, HSDP accumulates shards reduced over the shard axis alone; the next backward with true reduces
  // over replicas.
  void set_requires_all_reduce(bool value, bool recurse = true);
  // If false, parameters stay gathered after backward, for the next forward.
  void set_reshard_after_backward(bool value, bool recurse = true);
  void set_reshard_after_forward(bool value, bool recurse = true);
  // If false, backward ends without waiting for its reductions; the next one waits.
  void set_is_last_backward(bool value);
  // Gradients are summed over the data-parallel ranks and divided by this factor instead of the number of
  // ranks. A parameter that is itself distributed over the data-parallel axes has a single gradient, that of
  // the whole distributed batch; it is divided by this factor.
  void set_gradient_divide_factor(double factor, bool recurse = true);
  // [collective] Replaces the end of backward for a pipeline schedule: every group under this module reshards
  // and reduces, then final_callback waits for all of it.
  void post_backward();
  void final_callback();

  // ---- prefetching; both lists contain other modules under the same root ----
  void set_modules_to_forward_prefetch(const std::vector<ShardState*>& states);
  void set_modules_to_backward_prefetch(const std::vector<ShardState*>& states);
  // Whether the order of the last forward decides if no list is set. On by default; applies to the whole
  // root.
  void set_automatic_prefetch(bool value);

  // Whether gathers and reductions run on separate CUDA streams, beside the computation. On by default;
  // applies to the whole root.
  void set_own_streams(bool value);
  // Those streams, for profilers and tests; std::nullopt on the CPU, before the first forward and when they
  // are off.
  std::optional<c10::Stream> gather_stream();
  std::optional<c10::Stream> reduce_stream();

  // For the whole root. Zero or empty before the first forward.
  std::int64_t peak_gathered_bytes();
  void reset_peak();
  std::size_t pool_allocations();
  ShardTimes times();
  void reset_times();

 private:
  friend std::shared_ptr<ShardState> make_shard_state(torch::nn::Module&, const ShardMesh&, const ShardOptions&);
  ShardState() = default;
  template <class Set>
  void for_groups(bool recurse, Set&& set);

  bool holds_module(const torch::nn::Module& module) const;
  ShardContext* root_context();  // null before the first forward

  // Only compared, never dereferenced.
  const torch::nn::Module* module_ = nullptr;
  std::vector<const torch::nn::Module*> inner_modules_;
  std::string name_;
  std::vector<std::unique_ptr<ShardGroup>> groups_;
  ShardState* parent_ = nullptr;
  std::vector<ShardState*> subtree_;
};

std::shared_ptr<ShardState> make_shard_state(torch::nn::Module& module, const ShardMesh& mesh, const ShardOptions& options);
std::shared_ptr<ShardState> find_shard_state(const torch::nn::Module& module);
// The same, but also finds the state if every parameter of the module was replaced by another object of its
// name and shape.
std::shared_ptr<ShardState> find_replaced_shard_state(const torch::nn::Module& module);

}  // namespace penstock
