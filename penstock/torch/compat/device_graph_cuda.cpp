#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/device_graph.h"
#include "penstock/torch/compat/streams.h"

namespace penstock {

struct DeviceGraph::Impl {
  // LibTorch cannot record on the default stream. A stream of the pool could be handed to other users too,
  // whose work would be recorded.
  explicit Impl(c10::Device device)
      : device(device), stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  c10::Device device;
  c10::cuda::CUDAStream stream;
  std::optional<at::cuda::CUDAGraph> graph;
};

namespace {

c10::Device cuda_device(c10::Device device) {
  if (!device.is_cuda())
    throw ValueError(describe("device of a CUDA graph", device.str(), "a CUDA device",
                              "run without a CUDA graph on this device"));
  return {c10::kCUDA, device.has_index() ? device.index() : c10::cuda::current_device()};
}

// If the device has aborted a recording, LibTorch does not finish ending it: the allocator keeps a pool for
// it, and the random number generator still considers itself inside the recording and fails forever. This
// resets both.
void finish_abandoned(c10::Device device, at::cuda::MempoolId_t pool, std::uint64_t seed,
                      std::uint64_t offset) {
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device.index(), pool);
  } catch (const c10::Error&) {
    // LibTorch had already ended the allocation to the pool.
  }
  at::Generator generator = at::cuda::detail::createCUDAGenerator(device.index());
  generator.set_current_seed(seed);
  generator.set_offset(offset);
  at::Generator(at::cuda::detail::getDefaultCUDAGenerator(device.index())).graphsafe_set_state(generator);
  cudaGetLastError();  // clear the error, which has been reported
}

}  // namespace

DeviceGraph::DeviceGraph(c10::Device device) : impl_(std::make_unique<Impl>(cuda_device(device))) {}
DeviceGraph::~DeviceGraph() = default;
DeviceGraph::DeviceGraph(DeviceGraph&&) noexcept = default;

void DeviceGraph::warm_up(const std::function<void()>& work) {
  const c10::Stream outer = current_stream(impl_->device);
  order_after(impl_->stream.unwrap(), outer);
  {
    const c10::cuda::CUDAStreamGuard guard(impl_->stream);
    work();
  }
  order_after(outer, impl_->stream.unwrap());
}

void DeviceGraph::record(const std::function<void()>& work) {
  PENSTOCK_INVARIANT(!impl_->graph, "a graph is recorded once");
  order_after(impl_->stream.unwrap(), current_stream(impl_->device));
  const c10::cuda::CUDAStreamGuard guard(impl_->stream);
  const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator(impl_->device.index());
  const std::uint64_t seed = generator.current_seed(), offset = generator.get_offset();
  const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  impl_->graph.emplace();
  // Only this thread can invalidate the recording: other threads, such as a data loader, may allocate and
  // copy meanwhile.
  impl_->graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  std::exception_ptr failed;
  try {
    work();
  } catch (...) {
    failed = std::current_exception();
  }
  // End the capture in any case, to release the stream and the allocator. After a failure this fails too,
  // with a less useful error.
  try {
    impl_->graph->capture_end();
  } catch (const c10::Error& error) {
    finish_abandoned(impl_->device, pool, seed, offset);
    impl_->graph.reset();
    if (!failed)
      throw StateError(describe("recording a CUDA graph on " + impl_->device.str(),
                                error.what_without_backtrace(),
                                "kernel launches only: no value read back, no wait, no stream left open",
                                "find what waits for the device, or run without a CUDA graph"));
  }
  if (!failed) return;
  impl_->graph.reset();
  std::rethrow_exception(failed);
}

void DeviceGraph::replay() {
  if (!impl_->graph)
    throw StateError(
        describe("replay of a CUDA graph", "nothing is recorded", "a recorded graph", "call record first"));
  impl_->graph->replay();
}

}  // namespace penstock
