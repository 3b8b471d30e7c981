// A CUDA graph: device work that is recorded once and then launched as a unit.
//
//   DeviceGraph graph(device);
//   graph.warm_up([&] { step(); });              // runs on the recording stream, for lazy initialization
//   graph.record([&] { step(); });               // runs on the host only; the device executes nothing
//   x.copy_(next), graph.replay();               // repeats the device work on the same memory
//
// The graph records kernel launches with the addresses they read and write: inputs must be copied to the same
// addresses, and results appear at the same addresses; both keep the values of the last replay. Memory
// allocated during recording belongs to the graph and is freed with it. Host work is not repeated. LibTorch's
// random operators draw new numbers at each replay.
//
// Work on other streams is recorded if it starts after and ends before the work of the current stream
// (order_after); so is the work of autograd's threads. Reading a value back or waiting for the device ends
// the recording with an error.
// Thread safety: one thread.
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

  // Runs `work` on the recording stream, after the work already queued on the current stream, which then
  // waits for it.
  void warm_up(const std::function<void()>& work);

  // May be called once. Throws StateError if something in `work` cannot be recorded; exceptions thrown by
  // `work` itself propagate. In both cases nothing is recorded.
  void record(const std::function<void()>& work);

  // Launches in the current stream and does not wait. Throws StateError before `record`.
  void replay();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
