// The two CUDA streams of overlapped units: the forward of a unit runs on one, its backward on the other.
//
// Autograd runs the backward of an operator on the stream of its forward. A stream is therefore assigned to a
// (stage, microbatch) pair at its forward: the stream that the backward in the same unit does not use.
// Everything computed for the pair later, including I, W and deferred weights, runs with that stream as the
// current one. Forwards outside of units run on the caller's stream.
//
// Order. The two streams are synchronized before and after each unit, and before and after a single action
// that belongs to the second stream. Code that computes outside of units, sends or receives therefore only
// has to know the caller's stream. Memory: every tensor that a pair takes from outside is recorded on its
// stream, because its memory may belong to the other stream, which could reuse it while this one still reads
// it.
//
// Thread safety: one thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <optional>
#include <utility>

namespace penstock {

class OverlapStreams {
 public:
  // Returns std::nullopt if the device has no second stream: on CPU, and without CUDA.
  static std::optional<OverlapStreams> of(c10::Device device);

  // Makes the current stream the caller's stream for this step. Clears the streams of all pairs.
  void begin_step();

  c10::Stream of_pair(int stage, int microbatch) const;
  void set_pair(int stage, int microbatch, const c10::Stream& stream);
  c10::Stream other(const c10::Stream& stream) const;
  bool is_second(const c10::Stream& stream) const { return stream == second_; }

  // fork: the second stream waits for the first. join: the first waits for the second.
  void fork() const;
  void join() const;

 private:
  OverlapStreams(c10::Device device, c10::Stream second);

  c10::Device device_;
  c10::Stream first_;
  c10::Stream second_;
  std::map<std::pair<int, int>, c10::Stream> pairs_;  // pairs on the second stream
};

}  // namespace penstock
