// Where computation begins to need a sharded parameter: the operator that takes it.
//
// C++ modules have no forward hooks, and hold their parameters as members. So the operators themselves are watched: each one on a
// parameter of a group, on a view of it, or on what autograd saved of it, passes through here, in forward and in backward.
//
//   the operator                                                                  works on
//   records gradients, or belongs to a backward                                   the gathered parameter
//   takes an activation beside the parameter (a plain tensor, or a distributed
//   one that does not lie as the shard does)                                      the gathered parameter
//   is a view other than detach (t, narrow, view: what modules do under NoGrad)   the gathered parameter
//   takes parameters, gradients and numbers alone, without gradients recorded     the shards
//
// The last row is optimizers, norms and initialization; also weights that are derived from parameters without gradients (W + B A). What
// came of it is remembered: an operator that takes it beside an activation works on the whole of it. Writing to a gathered parameter is a StateError outside of an
// UnshardedScope: the shards would not change.
// Private to this folder.
#pragma once

namespace penstock {

// Once per process; called by fully_shard.
void install_trigger();

}  // namespace penstock
