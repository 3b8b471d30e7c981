// Streams of a device, whatever kind it is: which one is current, who waits for whom, and one of high priority to work beside it.
//
//   if (const auto side = priority_stream(device)) {
//     const c10::Stream main = current_stream(device);
//     order_after(*side, main);                       // what follows on `side` sees what `main` was given before
//     { c10::StreamGuard guard(*side); y = f(x); }
//     x.record_stream(*side);                         // its memory is not given away while `side` may still read it
//     order_after(main, *side);
//   }
//
// Nothing here blocks the host. Compiles, and says that there is no second stream, where LibTorch has no CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace penstock {

// The one stream of highest priority that Penstock has on this device: made when it is first asked for, once per device, kept until
// the process ends. It is not from LibTorch's pool, where others would get it too. None on devices other than CUDA ones and in
// builds without CUDA. Any thread.
std::optional<c10::Stream> priority_stream(c10::Device device);

c10::Stream current_stream(c10::Device device);

// One of LibTorch's pool, to copy or compute beside the current one; on a device without streams its only one.
c10::Stream side_stream(c10::Device device);

// What is given to `later` from now on runs after what `first` has been given so far. Nothing when they are one stream.
void order_after(const c10::Stream& later, const c10::Stream& first);

// Until its end what is given to the current stream goes to `side` instead, after everything that the current stream has been given before.
// Does nothing where there is no side stream. Memory that is allocated inside and used by the other stream afterwards, or the reverse, needs
// record_stream.
class SideStreamScope {
 public:
  explicit SideStreamScope(const std::optional<c10::Stream>& side);

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace penstock
