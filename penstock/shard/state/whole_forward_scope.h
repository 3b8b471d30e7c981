// Gathers all sharded parameters of a forward that runs as one captured graph: nothing inside the graph says
// when the parameters of which module are used.
//
//   {
//     const WholeForwardScope scope(states);        // gathered; gradients will go to the groups
//     results = captured(parameters, inputs);       // builds the autograd node
//   }                                               // freed as after a forward, unless somebody holds them
//
// In backward, operators of the graph on saved parameters gather the groups again (trigger.h), and a group is
// freed when its gradients have arrived. During forward, all parameters of the stage are in memory.
// [collective over the shard axes]
#pragma once

#include <vector>

#include "penstock/shard/state/shard_state.h"
#include "penstock/torch/dispatch/gradient_sink.h"

namespace penstock {

class WholeForwardScope {
 public:
  // Throws NotImplemented for MixedPrecision::param_dtype with cast_forward_inputs: inputs are then cast at
  // operators that a graph does not intercept.
  explicit WholeForwardScope(const std::vector<ShardState*>& states);
  ~WholeForwardScope();
  WholeForwardScope(const WholeForwardScope&) = delete;
  WholeForwardScope& operator=(const WholeForwardScope&) = delete;

 private:
  void end();

  struct Gathered {
    ShardGroup* group;
    bool was_held;
  };
  std::vector<Gathered> gathered_;
  std::vector<AccumulatorPtr> accumulators_;  // until the autograd graph holds them
};

}  // namespace penstock
