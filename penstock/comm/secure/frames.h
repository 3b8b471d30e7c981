// Authenticated frames on a connection whose ends have shaken hands.
//
// A frame is the length of its payload (4 bytes, most significant first), a tag, and the payload. The tag is
// an HMAC over the frame's number, the length and the payload, under the key of this direction: bytes that
// somebody changed, injected, repeated, reordered or sent back are refused. The payload is not encrypted.
//
// Thread safety: use an object from one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "penstock/comm/secure/sha256.h"

namespace penstock::comm {

inline constexpr std::size_t kFrameHeaderBytes = 4 + kDigestBytes;

class FrameWriter {
 public:
  FrameWriter(const Digest& key, std::size_t max_payload) : key_(key), max_payload_(max_payload) {}

  // Returns the bytes to send. Throws ValueError for a payload longer than the limit, and sends nothing.
  std::string frame(std::string_view payload);

 private:
  Digest key_;
  std::size_t max_payload_;
  std::uint64_t number_ = 0;
};

class FrameReader {
 public:
  FrameReader(const Digest& key, std::size_t max_payload) : key_(key), max_payload_(max_payload) {}

  // Takes bytes as they arrive. Memory grows with what has arrived, never with what was announced.
  void feed(std::string_view bytes) { buffer_.append(bytes); }

  // Returns the next payload, or std::nullopt if it is not complete yet. Throws MismatchError for a frame
  // that is too long or whose tag is wrong; the connection must then be closed.
  std::optional<std::string> next();

  // Bytes that were fed and not yet returned.
  std::size_t buffered() const { return buffer_.size() - begin_; }

 private:
  Digest key_;
  std::size_t max_payload_;
  std::uint64_t number_ = 0;
  std::string buffer_;
  std::size_t begin_ = 0;  // of the next frame in buffer_
};

}  // namespace penstock::comm
