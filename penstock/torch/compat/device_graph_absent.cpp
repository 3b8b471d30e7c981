// Replaces device_graph_cuda.cpp in builds without CUDA.
#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/device_graph.h"

namespace penstock {

struct DeviceGraph::Impl {};

DeviceGraph::DeviceGraph(c10::Device device) {
  throw ValueError(describe("device of a CUDA graph", device.str(), "a CUDA device, in a build with CUDA",
                            "run without a CUDA graph on this device"));
}
DeviceGraph::~DeviceGraph() = default;
DeviceGraph::DeviceGraph(DeviceGraph&&) noexcept = default;
void DeviceGraph::warm_up(const std::function<void()>&) {
  PENSTOCK_INVARIANT(false, "there are no CUDA graphs in a build without CUDA");
}
void DeviceGraph::record(const std::function<void()>&) {
  PENSTOCK_INVARIANT(false, "there are no CUDA graphs in a build without CUDA");
}
void DeviceGraph::replay() { PENSTOCK_INVARIANT(false, "there are no CUDA graphs in a build without CUDA"); }

}  // namespace penstock
