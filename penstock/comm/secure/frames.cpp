#include "penstock/comm/secure/frames.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// The tag of a frame. The number is not sent: both ends count.
Digest frame_tag(const Digest& key, std::uint64_t number, std::string_view length, std::string_view payload) {
  char counted[8];
  for (int i = 0; i < 8; ++i) counted[i] = static_cast<char>(number >> (56 - 8 * i));
  return HmacSha256(as_text(key)).update({counted, sizeof counted}).update(length).update(payload).finish();
}

}  // namespace

std::string FrameWriter::frame(std::string_view payload) {
  if (payload.size() > max_payload_)
    throw ValueError(describe("message between ranks", fmt::format("{} bytes", payload.size()),
                              fmt::format("at most {} bytes", max_payload_),
                              "exchange large data as tensors, not through the store"));
  std::string bytes;
  bytes.reserve(kFrameHeaderBytes + payload.size());
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(payload.size() >> shift);
  bytes += as_text(frame_tag(key_, number_++, std::string_view(bytes).substr(0, 4), payload));
  bytes += payload;
  return bytes;
}

std::optional<std::string> FrameReader::next() {
  const std::string_view waiting = std::string_view(buffer_).substr(begin_);
  if (waiting.size() < kFrameHeaderBytes) return std::nullopt;
  std::size_t length = 0;
  for (std::size_t i = 0; i < 4; ++i) length = length << 8 | static_cast<unsigned char>(waiting[i]);
  if (length > max_payload_)
    throw MismatchError(describe("frame of a peer", fmt::format("{} bytes", length),
                                 fmt::format("at most {} bytes", max_payload_)));
  if (waiting.size() < kFrameHeaderBytes + length) return std::nullopt;
  const std::string_view payload = waiting.substr(kFrameHeaderBytes, length);
  if (!equal_in_constant_time(waiting.substr(4, kDigestBytes),
                              as_text(frame_tag(key_, number_, waiting.substr(0, 4), payload))))
    throw MismatchError(fmt::format(
        "frame {} of a peer has a wrong tag: the bytes were changed, repeated or injected on the way",
        number_));
  ++number_;
  std::string result(payload);
  begin_ += kFrameHeaderBytes + length;
  if (begin_ == buffer_.size()) {
    buffer_.clear();
    begin_ = 0;
  } else if (begin_ > buffer_.size() / 2) {
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  return result;
}

}  // namespace penstock::comm
