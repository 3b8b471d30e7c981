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
  // LibTorch records on no default stream. One of the pool would do, were it not for others who might get it and be recorded with us.
  explicit Impl(c10::Device device) : device(device), stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  c10::Device device;
  c10::cuda::CUDAStream stream;
  std::optional<at::cuda::CUDAGraph> graph;
};

namespace {

c10::Device cuda_device(c10::Device device) {
  if (!device.is_cuda()) throw ValueError(describe("device of a recording", device.str(), "a CUDA device", "run without a recording on this device"));
  return {c10::kCUDA, device.has_index() ? device.index() : c10::cuda::current_device()};
}

// Where the device itself has given a recording up, LibTorch stops half way in ending it: the allocator still keeps a pool for it, and the
// generator of random numbers believes to be in it, so that it fails forever. This ends both.
void finish_abandoned(c10::Device device, at::cuda::MempoolId_t pool, std::uint64_t seed, std::uint64_t offset) {
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device.index(), pool);
  } catch (const c10::Error&) {
    // It had come as far as that.
  }
  at::Generator generator = at::cuda::detail::createCUDAGenerator(device.index());
  generator.set_current_seed(seed);
  generator.set_offset(offset);
  at::Generator(at::cuda::detail::getDefaultCUDAGenerator(device.index())).graphsafe_set_state(generator);
  cudaGetLastError();  // has been reported
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
  PENSTOCK_INVARIANT(!impl_->graph, "a recording is made once");
  order_after(impl_->stream.unwrap(), current_stream(impl_->device));
  const c10::cuda::CUDAStreamGuard guard(impl_->stream);
  const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator(impl_->device.index());
  const std::uint64_t seed = generator.current_seed(), offset = generator.get_offset();
  const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  impl_->graph.emplace();
  // Only what this thread does may spoil the recording: others, like a loader of data, may allocate and copy meanwhile.
  impl_->graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  std::exception_ptr failed;
  try {
    work();
  } catch (...) {
    failed = std::current_exception();
  }
  // Ended in any case: the stream and the allocator must be free again. After a failure the end fails too, and says less.
  try {
    impl_->graph->capture_end();
  } catch (const c10::Error& error) {
    finish_abandoned(impl_->device, pool, seed, offset);
    impl_->graph.reset();
    if (!failed)
      throw StateError(describe("recording of work on " + impl_->device.str(), error.what_without_backtrace(), "launches alone: no value read back, no wait, no stream left open",
                                "find what waits for the device, or run without a recording"));
  }
  if (!failed) return;
  impl_->graph.reset();
  std::rethrow_exception(failed);
}

void DeviceGraph::replay() {
  if (!impl_->graph) throw StateError(describe("replay of a recording", "nothing is recorded", "a recording", "call record first"));
  impl_->graph->replay();
}

}  // namespace penstock
