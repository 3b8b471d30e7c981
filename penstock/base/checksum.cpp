#include "penstock/base/checksum.h"

#include <bit>
#include <cstddef>
#include <cstring>

#ifdef PENSTOCK_HAVE_XXHASH
#define XXH_INLINE_ALL  // header-only: no library to link
#include <xxhash.h>
#else
#include <fmt/format.h>

#include "penstock/errors.h"
#endif

namespace penstock {

namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

static_assert(std::endian::native == std::endian::little, "files are little-endian and mapped unconverted");

template <class T>
T load(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint64_t mix(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
  return (hash ^ mix(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace

std::uint64_t plain_checksum64(std::span<const std::uint8_t> bytes) {
  const std::uint8_t* at = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t hash = kPrime5;
  if (left >= 32) {
    std::uint64_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    for (; left >= 32; left -= 32) {
      for (std::uint64_t& lane : lanes) {
        lane = mix(lane, load<std::uint64_t>(at));
        at += 8;
      }
    }
    hash =
        std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const std::uint64_t lane : lanes) hash = merge(hash, lane);
  }
  hash += bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    hash = std::rotl(hash ^ mix(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ (load<std::uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4;
    at += 4;
  }
  for (; left > 0; --left, ++at) hash = std::rotl(hash ^ (*at * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

std::uint64_t checksum64(std::span<const std::uint8_t> bytes) {
#ifdef PENSTOCK_HAVE_XXHASH
  return XXH64(bytes.data(), bytes.size(), 0);
#else
  return plain_checksum64(bytes);
#endif
}

std::uint64_t checksum64(std::string_view text) {
  return checksum64({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

#ifdef PENSTOCK_HAVE_XXHASH

std::uint64_t xxh3_checksum64(std::span<const std::uint8_t> bytes, std::string_view) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

void require_xxhash(std::string_view) {}

#else

// There is no fallback for XXH3: another checksum would produce files that other builds reject.
std::uint64_t xxh3_checksum64(std::span<const std::uint8_t>, std::string_view user) {
  require_xxhash(user);
  return 0;
}

void require_xxhash(std::string_view user) {
  throw ConfigError(fmt::format(
      "{}: this build has no xxHash; install its header (Debian: libxxhash-dev) and build again", user));
}

#endif

}  // namespace penstock
