// The key of a cache entry: a 128-bit hash of named fields.
//
//   const CacheKey key = KeyBuilder().field("libtorch", "1.13.1").field("graph", bytes).key();
//   key.text();                         // 32 hexadecimal digits, the name of the entry's file
//
// Two keys are equal if their fields are, in the same order; names and values are hashed with their lengths.
// The hash detects differences, not tampering. Thread safety: that of a value.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::graph {

struct CacheKey {
  std::uint64_t high = 0, low = 0;

  std::string text() const;
  bool operator==(const CacheKey&) const = default;
};

// The same, of bytes alone.
CacheKey hash_of_bytes(std::span<const std::uint8_t> bytes);

class KeyBuilder {
 public:
  KeyBuilder& field(std::string_view name, std::string_view value);
  KeyBuilder& field(std::string_view name, std::span<const std::uint8_t> value);
  KeyBuilder& fields(const std::vector<std::pair<std::string, std::string>>& all);
  CacheKey key() const;

 private:
  std::vector<std::uint8_t> bytes_;  // of each field: its name, and its value or a hash of it
};

}  // namespace penstock::graph
