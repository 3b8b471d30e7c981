// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for the handshake and the frames between ranks.
//
// An implementation of its own: what the project links has no cryptography, and these two functions are small
// and fully covered by published test vectors. Thread safety: use an object from one thread; the functions
// are pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace penstock::comm {

inline constexpr std::size_t kDigestBytes = 32;
using Digest = std::array<std::uint8_t, kDigestBytes>;

// The digest of bytes that arrive in parts.
class Sha256 {
 public:
  Sha256();
  Sha256& update(std::string_view bytes);
  // Returns the digest of everything so far. The object must not be used afterwards.
  Digest finish();

 private:
  void absorb(const std::uint8_t* block);

  std::array<std::uint32_t, 8> state_;
  std::array<std::uint8_t, 64> block_{};
  std::uint64_t length_ = 0;  // bytes so far
};

// The same with a key, which may have any length.
class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  HmacSha256& update(std::string_view bytes);
  Digest finish();

 private:
  Sha256 inner_, outer_;
};

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

// Compares in a time that depends on the length alone, so that nobody can guess a digest byte by byte.
// Texts of different lengths differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

// A digest as bytes of a message.
inline std::string_view as_text(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace penstock::comm
