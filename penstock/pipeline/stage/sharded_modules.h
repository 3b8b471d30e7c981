// The sharded modules (shard/fully_shard.h) of one stage, driven by the schedule: gathered where it has UNSHARD, freed where it has
// RESHARD, gradients reduced once where it has REDUCE_GRAD.
//
// In a step every microbatch's backward leaves whole gradients on this rank, added up; no backward frees or reduces. What is gathered
// stays so until the schedule says otherwise, or the step ends. A stage without sharded modules costs nothing here.
// [collective over the ranks that share the parameters]: all of them run the same schedule.
#pragma once

#include <vector>

#include "penstock/stage_module.h"
#include "penstock/shard/state/shard_state.h"

namespace penstock::pipeline {

class ShardedModules {
 public:
  // Finds the outermost sharded modules, at any depth.
  explicit ShardedModules(const StageModule& module);

  bool any() const { return !roots_.empty(); }
  void begin_step();
  void unshard();
  void reshard();
  // grad() of every parameter is then the sum over microbatches, averaged over data-parallel ranks, in its shard.
  void reduce();
  // Frees what is still gathered and lets modules act by themselves again.
  void end_step();

 private:
  void set_driven(bool driven);

  std::vector<ShardState*> roots_;
};

// While it lives, the parameters of the stage's sharded modules are those of a trial run: of the gathered shape, fake or zeros. Nothing is
// communicated, so replicas may try their stages at different steps. Scopes end in reverse order.
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

}  // namespace penstock::pipeline
