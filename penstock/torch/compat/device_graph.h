// Work of a device, recorded once and launched again as one: a CUDA graph.
//
//   DeviceGraph graph(device);
//   graph.warm_up([&] { step(); });              // runs, on the stream that will record: what is made at first use exists afterwards
//   graph.record([&] { step(); });               // runs on the host alone; the device is given nothing
//   x.copy_(next), graph.replay();               // the device does all of it again, on the same memory, in the current stream
//
// Recorded are the launches, with the addresses that they read and write: inputs must be put where they were, results are found where
// they were, and both hold what the last replay left. Memory that the recording allocated belongs to it as long as it lives. What the
// host did is not repeated. Random operators of LibTorch draw new numbers at each replay.
//
// Work on other streams belongs to the recording where it begins after and ends before that of the current one (order_after), and so
// does that of autograd's threads. Reading a value back or waiting for the device ends a recording with an error.
// Thread rule: one thread.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace penstock {

class DeviceGraph {
 public:
  // Throws ValueError for a device that is not a CUDA one, and in builds without CUDA.
  explicit DeviceGraph(c10::Device device);
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&&) noexcept;

  // Runs `work` on the recording stream, after what the current stream has been given; the current one waits for it.
  void warm_up(const std::function<void()>& work);

  // Once. Throws StateError if something in `work` cannot be recorded; what `work` throws by itself passes through. Nothing is recorded then.
  void record(const std::function<void()>& work);

  // In the current stream; does not wait. StateError before `record`.
  void replay();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
