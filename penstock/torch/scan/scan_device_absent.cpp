// Replaces scan_device_cuda.cpp in builds without CUDA.
#include "penstock/errors.h"
#include "penstock/torch/scan/scan_device.h"

namespace penstock::detail {

namespace {
[[noreturn]] void absent_scan() { throw StateError("a CUDA scan was called in a build without CUDA"); }
}  // namespace

void launch_sums(const ScanTensors&, const at::Tensor&) { absent_scan(); }
void launch_weights(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent_scan();
}
void launch_inputs(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent_scan();
}
void launch_pass(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const at::Tensor&) {
  absent_scan();
}
void launch_join(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const at::Tensor&) {
  absent_scan();
}
void launch_gradients(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&) {
  absent_scan();
}
void launch_weights_backward(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent_scan();
}
void launch_pass_backward(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&, const at::Tensor&) {
  absent_scan();
}
void launch_ends(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const at::Tensor&) {
  absent_scan();
}
void launch_join_backward(const ScanTensors&, const at::Tensor&, const JoinedGradients&) { absent_scan(); }
void launch_steps_backward(const ScanTensors&, const JoinedGradients&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&) {
  absent_scan();
}
void scan_step_on_cuda(const ScanTensors&, const at::Tensor&, const at::Tensor&) { absent_scan(); }

}  // namespace penstock::detail
