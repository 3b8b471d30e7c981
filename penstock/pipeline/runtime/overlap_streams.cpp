#include "penstock/pipeline/runtime/overlap_streams.h"

#include "penstock/torch/compat/streams.h"

namespace penstock {

OverlapStreams::OverlapStreams(c10::Device device, c10::Stream second)
    : device_(device), first_(current_stream(device)), second_(second) {}

std::optional<OverlapStreams> OverlapStreams::of(c10::Device device) {
  const auto second = priority_stream(device);
  if (!second) return std::nullopt;
  return OverlapStreams(device, *second);
}

void OverlapStreams::begin_step() {
  first_ = current_stream(device_);
  pairs_.clear();
}

c10::Stream OverlapStreams::of_pair(int stage, int microbatch) const {
  const auto at = pairs_.find({stage, microbatch});
  return at == pairs_.end() ? first_ : at->second;
}

void OverlapStreams::set_pair(int stage, int microbatch, const c10::Stream& stream) {
  if (stream == first_) {
    pairs_.erase({stage, microbatch});
  } else {
    pairs_.insert_or_assign({stage, microbatch}, stream);
  }
}

c10::Stream OverlapStreams::other(const c10::Stream& stream) const {
  return stream == first_ ? second_ : first_;
}

void OverlapStreams::fork() const { order_after(second_, first_); }
void OverlapStreams::join() const { order_after(first_, second_); }

}  // namespace penstock
