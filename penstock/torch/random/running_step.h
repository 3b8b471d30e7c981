// Values of the step that is running, for operators of captured graphs: a graph is captured once and replayed
// in many steps, so that what differs between them must not be a constant in it.
//
//   RandomKey key = key_of_running_step(layer, purpose);      // the same numbers in every capture
//   completed(key.to_ints())                                  // with seed, step and microbatch of this
//   thread
//   GlobalBox box = box_of_running_step(x.sizes());           // the same for every data-parallel rank
//   CompletedBox(box.global_shape, box.offset)                // with the rows of this thread
//
// Random operators complete their keys and boxes when they run. Forward and backward of a graph run under the
// same StepContext (graph/run/saving_node.h).
#pragma once

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstdint>
#include <vector>

#include "penstock/random.h"

namespace penstock {

// Returns a key that stands for that of the step in which an operator with it runs.
RandomKey key_of_running_step(std::int64_t layer, std::int64_t purpose);

// Returns the five numbers of a key. Those of key_of_running_step() get seed, step and microbatch of the
// current StepContext; throws what StepContext::key() throws.
std::array<std::int64_t, 5> completed(at::IntArrayRef key);

// Returns a box that stands for StepContext::box_of(sizes) of the step in which an operator with it runs: dim
// 0 has numbers below every real size and offset. Adding to the offset moves the completed box as well.
// Throws ValueError for a tensor without dims.
GlobalBox box_of_running_step(at::IntArrayRef sizes);

// Whether a dim of a box waits for the rows of the running step.
bool waits_for_rows(std::int64_t global, std::int64_t offset);

// A box of which no dim waits. Refers to the given numbers if none did, so they must stay.
class CompletedBox {
 public:
  // Throws StateError while a graph is captured, and what StepContext::box_of() throws.
  CompletedBox(at::IntArrayRef global_shape, at::IntArrayRef offset);
  CompletedBox(const CompletedBox&) = delete;
  CompletedBox& operator=(const CompletedBox&) = delete;

  at::IntArrayRef global_shape() const { return global_shape_; }
  at::IntArrayRef offset() const { return offset_; }

 private:
  at::IntArrayRef global_shape_, offset_;
  std::vector<std::int64_t> own_shape_, own_offset_;
};

// Within its scope, StepContext::box_of() of a captured context returns box_of_running_step(), also in the
// contexts of guards inside of it: for a capture that is replayed with any rows.
class AnyRowsScope {
 public:
  AnyRowsScope();
  AnyRowsScope(const AnyRowsScope&) = delete;
  AnyRowsScope& operator=(const AnyRowsScope&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

// Returns a scalar like `like`: the loss scale of the running step times `factor`. An operator of the
// dispatcher, so that a captured graph has the loss scale of each replay.
at::Tensor scale_of_running_step(const at::Tensor& like, double factor);

}  // namespace penstock
