#include "penstock/graph/cache/cache_key.h"

#include <fmt/format.h>

#include "penstock/base/checksum.h"
#include "penstock/graph/cache/byte_stream.h"

namespace penstock::graph {
namespace {

// Longer values are replaced by their hash.
constexpr std::size_t kLongestValue = 256;

}  // namespace

std::string CacheKey::text() const { return fmt::format("{:016x}{:016x}", high, low); }

CacheKey hash_of_bytes(std::span<const std::uint8_t> bytes) {
  // XXH64 has one seed here: the second half starts from another state by hashing a prefix that depends on
  // the first.
  CacheKey key;
  key.high = checksum64(bytes);
  Bytes again;
  again.reserve(bytes.size() + 40);
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t salt = (key.high ^ 0x9e3779b97f4a7c15ULL) + static_cast<std::uint64_t>(i);
    const auto* from = reinterpret_cast<const std::uint8_t*>(&salt);
    again.insert(again.end(), from, from + sizeof salt);
  }
  again.insert(again.end(), bytes.begin(), bytes.end());
  key.low = checksum64(again);
  return key;
}

KeyBuilder& KeyBuilder::field(std::string_view name, std::span<const std::uint8_t> value) {
  ByteWriter out;
  out.text(name);
  out.count(value.size());
  if (value.size() <= kLongestValue) {
    out.raw(value);
  } else {
    const CacheKey hash = hash_of_bytes(value);
    out.number(hash.high);
    out.number(hash.low);
  }
  bytes_.insert(bytes_.end(), out.bytes.begin(), out.bytes.end());
  return *this;
}

KeyBuilder& KeyBuilder::field(std::string_view name, std::string_view value) {
  return field(name, std::span(reinterpret_cast<const std::uint8_t*>(value.data()), value.size()));
}

KeyBuilder& KeyBuilder::fields(const std::vector<std::pair<std::string, std::string>>& all) {
  for (const auto& [name, value] : all) field(name, value);
  return *this;
}

CacheKey KeyBuilder::key() const { return hash_of_bytes(bytes_); }

}  // namespace penstock::graph
