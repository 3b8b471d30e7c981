// Detects when computation needs a sharded parameter: at the operator that takes it.
//
// C++ modules have no forward hooks and hold their parameters as members. Therefore the operators are
// intercepted: each operator on a parameter of a group, on a view of it, or on what autograd saved of it
// passes through here, in forward and in backward.
//
//   the operator                                                                  works on
//   records gradients, or belongs to a backward                                   the gathered parameter
//   takes an activation besides the parameter (a plain tensor, or a distributed
//   one that is not placed like the shard)                                        the gathered parameter
//   is a view other than detach (t, narrow, view: what modules do under NoGrad)   the gathered parameter
//   takes parameters, gradients and numbers alone, without gradients recorded     the shards
//
// The last row covers optimizers, norms and initialization, and also weights derived from parameters without
// gradients (W + B A). Such results are remembered: an operator that takes one together with an activation
// works on the whole tensor. Writing to a gathered parameter outside an UnshardedScope is a StateError,
// because the shards would not change.
// Private to this folder.
#pragma once

namespace penstock {

// Once per process; called by fully_shard.
void install_trigger();

}  // namespace penstock
