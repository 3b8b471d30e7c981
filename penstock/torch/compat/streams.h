// Device streams for every kind of device: the current stream, ordering between streams, and a high-priority
// side stream.
//
//   if (const auto side = priority_stream(device)) {
//     const c10::Stream main = current_stream(device);
//     order_after(*side, main);                       // later work on `side` sees the earlier work of `main`
//     { c10::StreamGuard guard(*side); y = f(x); }
//     x.record_stream(*side);                         // keeps the memory until `side` has read it
//     order_after(main, *side);
//   }
//
// Nothing here blocks the host. Without CUDA this compiles and reports that there is no second stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace penstock {

// Returns Penstock's stream of highest priority on this device. It is created at the first call, once per
// device, and kept until the process ends. It does not come from LibTorch's pool, where others could get it
// too. Returns std::nullopt on devices other than CUDA and in builds without CUDA. Thread safety: any thread.
std::optional<c10::Stream> priority_stream(c10::Device device);

c10::Stream current_stream(c10::Device device);

// Returns a stream of LibTorch's pool, to copy or compute concurrently with the current one; on a device
// without streams, its only one.
c10::Stream side_stream(c10::Device device);

// Work queued on `later` from now on runs after the work queued on `first` so far. Does nothing if both are
// the same stream.
void order_after(const c10::Stream& later, const c10::Stream& first);

// Redirects the work of the current stream to `side` within the scope, after everything queued on the current
// stream so far. Does nothing if there is no side stream. Memory allocated inside the scope and used by the
// other stream afterwards, or the reverse, needs record_stream.
class SideStreamScope {
 public:
  explicit SideStreamScope(const std::optional<c10::Stream>& side);

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace penstock
