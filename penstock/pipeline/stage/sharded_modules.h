// The sharded modules (fully_shard.h) of one stage, driven by the schedule: parameters are gathered at
// UNSHARD, freed at RESHARD, and gradients are reduced once, at REDUCE_GRAD.
//
// During a step, the backward of each microbatch accumulates unsharded gradients on this rank; no backward
// frees or reduces. Gathered parameters stay gathered until a RESHARD or the end of the step. A stage without
// sharded modules has no overhead.
// [collective over the ranks that share the parameters]: all of them run the same schedule.
#pragma once

#include <vector>

#include "penstock/shard/state/shard_state.h"
#include "penstock/stage_module.h"

namespace penstock {

class ShardedModules {
 public:
  // Finds the outermost sharded modules, at any depth.
  explicit ShardedModules(const StageModule& module);

  bool any() const { return !roots_.empty(); }
  // The outermost sharded modules.
  const std::vector<ShardState*>& roots() const { return roots_; }
  void begin_step();
  void unshard();
  void reshard();
  // Afterwards grad() of each parameter is the sum over microbatches, averaged over data-parallel ranks, in
  // its shard.
  void reduce();
  // Frees what is still gathered and lets modules act on their own again.
  void end_step();

 private:
  void set_driven(bool driven);

  std::vector<ShardState*> roots_;
};

// During its lifetime, replaces the parameters of the stage's sharded modules by those of a trial run: of the
// gathered shape, fake or zeros. It does not communicate, so replicas may try their stages at different
// steps. Scopes end in reverse order.
class ShardedTrial {
 public:
  ShardedTrial(const StageModule& module, bool fake);
  ~ShardedTrial();
  ShardedTrial(const ShardedTrial&) = delete;
  ShardedTrial& operator=(const ShardedTrial&) = delete;

 private:
  void end();
  std::vector<ShardGroup*> groups_;
};

}  // namespace penstock
