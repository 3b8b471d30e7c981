// Values of the step that is running, for operators of captured graphs: a graph is captured once and replayed
// in many steps, so that what differs between them must not be a constant in it.
//
//   RandomKey key = key_of_running_step(layer, purpose);      // the same numbers in every capture
//   completed(key.to_ints())                                  // with seed, step and microbatch of this
//   thread
//
// Random operators complete their keys when they run. Forward and backward of a graph run under the same
// StepContext (graph/run/saving_node.h).
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>

#include "penstock/random.h"

namespace penstock {

// Returns a key that stands for that of the step in which an operator with it runs.
RandomKey key_of_running_step(std::int64_t layer, std::int64_t purpose);

// Returns the five numbers of a key. Those of key_of_running_step() get seed, step and microbatch of the
// current StepContext; throws what StepContext::key() throws.
std::array<std::int64_t, 5> completed(at::IntArrayRef key);

// Returns a scalar like `like`: the loss scale of the running step times `factor`. An operator of the
// dispatcher, so that a captured graph has the loss scale of each replay.
at::Tensor scale_of_running_step(const at::Tensor& like, double factor);

}  // namespace penstock
