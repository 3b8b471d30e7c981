// The checksum of all files of the trainer: XXH64 with seed 0 (xxhash.com), as printed by `xxhsum -H1`.
//
// It detects damage and mix-ups, not deliberate changes. Pure functions. Thread safety: any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace penstock::train {

std::uint64_t checksum64(std::span<const std::uint8_t> bytes);
std::uint64_t checksum64(std::string_view text);

// Own implementation of the same function: used if xxHash's header is missing, and compared with it in tests.
std::uint64_t plain_checksum64(std::span<const std::uint8_t> bytes);

}  // namespace penstock::train
