#include "penstock/torch/compat/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace penstock {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream side_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device);
}

void order_after(const c10::Stream& later, const c10::Stream& first) {
  if (later == first) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(later);
}

SideStreamScope::SideStreamScope(const std::optional<c10::Stream>& side) {
  if (!side) return;
  order_after(*side, current_stream(side->device()));
  guard_.reset_stream(*side);
}

}  // namespace penstock
