// The two CUDA streams of overlapped units: the forward of a unit runs on one, its backward on the other.
//
// Autograd runs the backward of an operator on the stream of its forward. So the stream belongs to a (stage, microbatch) and is chosen
// at its forward: the one that the backward in the same unit does not use. Everything that is computed for the pair later, I, W and
// deferred weights too, runs with that stream as the current one. Forwards outside of units run on the stream of the caller.
//
// Order. The two streams meet before and after each unit, and before and after a single action that belongs on the second one: the
// second waits for the first, the first for the second. What is computed outside, sent or received, therefore needs to know of one
// stream alone, the caller's. Memory: whatever a pair takes from outside is recorded on its stream, because its memory may belong to the
// other one, which could give it away while this one still reads it.
//
// Thread rule: one thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <optional>
#include <utility>

namespace penstock::pipeline {

class OverlapStreams {
 public:
  // Nothing where the device has no second stream: on CPU, and without CUDA.
  static std::optional<OverlapStreams> of(c10::Device device);

  // The stream that is current now is the caller's for this step. Forgets which pair ran where.
  void begin_step();

  c10::Stream of_pair(int stage, int microbatch) const;
  void set_pair(int stage, int microbatch, const c10::Stream& stream);
  c10::Stream other(const c10::Stream& stream) const;
  bool is_second(const c10::Stream& stream) const { return stream == second_; }

  // The second stream goes on where the first one is, and the other way round.
  void fork() const;
  void join() const;

 private:
  OverlapStreams(c10::Device device, c10::Stream second);

  c10::Device device_;
  c10::Stream first_;
  c10::Stream second_;
  std::map<std::pair<int, int>, c10::Stream> pairs_;  // those on the second stream
};

}  // namespace penstock::pipeline
