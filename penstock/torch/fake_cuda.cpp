#include "penstock/torch/fake_cuda.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "penstock/base/errors.h"
#include "penstock/torch/version.h"

namespace penstock::detail {
namespace {

using c10::Device;
using c10::Stream;

// Nothing runs on these devices, so there is nothing to switch and nothing to wait for.
class NoCuda final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return current(); }
  Device getDevice() const override { return current(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

 private:
  static Device current() { return Device(c10::DeviceType::CUDA, 0); }
};

// True when there is a guard for CUDA: LibTorch's own or ours.
bool register_guard() {
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)];
#if PENSTOCK_TORCH_AT_LEAST(2, 6)
  if (!slot.load()) slot.store(new NoCuda);
#endif
  return slot.load() != nullptr;
}

const bool guarded = register_guard();

}  // namespace

void check_cuda_can_require_grad() {
  if (!guarded)
    throw StateError("fake tensors: this LibTorch has no CUDA and is too old to differentiate CUDA tensors without it; make them without "
                     "requires_grad, put them on the CPU, or use LibTorch 2.6 or newer");
}

}  // namespace penstock::detail
