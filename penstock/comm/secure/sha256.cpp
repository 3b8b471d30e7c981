#include "penstock/comm/secure/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace penstock::comm {

namespace {

// The fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
constexpr std::array<std::uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The fractional parts of the square roots of the first 8 primes (FIPS 180-4, 5.3.3).
constexpr std::array<std::uint32_t, 8> kInitialState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr std::size_t kBlockBytes = 64;

std::uint32_t big_endian_word(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 |
         std::uint32_t{bytes[3]};
}

}  // namespace

Sha256::Sha256() : state_(kInitialState) {}

void Sha256::absorb(const std::uint8_t* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) w[i] = big_endian_word(block + 4 * i);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t near = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t far = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + near + w[i - 7] + far;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t sum_e = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t first = h + sum_e + choice + kRoundConstants[i] + w[i];
    const std::uint32_t sum_a = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + sum_a + majority;
  }
  const std::array<std::uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

Sha256& Sha256::update(std::string_view bytes) {
  const auto* next = reinterpret_cast<const std::uint8_t*>(bytes.data());
  std::size_t left = bytes.size();
  const std::size_t kept = length_ % kBlockBytes;
  length_ += left;
  if (kept > 0) {
    const std::size_t taken = std::min(left, kBlockBytes - kept);
    std::memcpy(block_.data() + kept, next, taken);
    next += taken;
    left -= taken;
    if (kept + taken < kBlockBytes) return *this;
    absorb(block_.data());
  }
  for (; left >= kBlockBytes; next += kBlockBytes, left -= kBlockBytes) absorb(next);
  if (left > 0) std::memcpy(block_.data(), next, left);
  return *this;
}

Digest Sha256::finish() {
  const std::uint64_t bits = length_ * 8;
  // A one bit, zeros up to 8 bytes before the end of a block, and the length in bits.
  static constexpr char kPadding[kBlockBytes] = {'\x80'};
  const std::size_t kept = length_ % kBlockBytes;
  update({kPadding, kept < 56 ? 56 - kept : 120 - kept});
  char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(bits >> (56 - 8 * i));
  update({length, sizeof length});
  Digest digest;
  for (std::size_t i = 0; i < 8; ++i)
    for (std::size_t k = 0; k < 4; ++k)
      digest[4 * i + k] = static_cast<std::uint8_t>(state_[i] >> (24 - 8 * k));
  return digest;
}

HmacSha256::HmacSha256(std::string_view key) {
  std::array<std::uint8_t, kBlockBytes> inner{};
  if (key.size() > kBlockBytes) {
    const Digest shorter = sha256(key);
    std::copy(shorter.begin(), shorter.end(), inner.begin());
  } else if (!key.empty()) {
    std::memcpy(inner.data(), key.data(), key.size());
  }
  std::array<std::uint8_t, kBlockBytes> outer = inner;
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    inner[i] ^= 0x36;
    outer[i] ^= 0x5c;
  }
  inner_.update({reinterpret_cast<const char*>(inner.data()), inner.size()});
  outer_.update({reinterpret_cast<const char*>(outer.data()), outer.size()});
}

HmacSha256& HmacSha256::update(std::string_view bytes) {
  inner_.update(bytes);
  return *this;
}

Digest HmacSha256::finish() {
  const Digest inside = inner_.finish();
  return outer_.update(as_text(inside)).finish();
}

Digest sha256(std::string_view bytes) { return Sha256().update(bytes).finish(); }

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  return HmacSha256(key).update(bytes).finish();
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile: a compiler must not leave the loop at the first difference.
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference = static_cast<unsigned char>(
        difference | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i])));
  return difference == 0;
}

}  // namespace penstock::comm
