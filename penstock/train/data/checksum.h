// The checksum of everything that the trainer keeps in files: XXH64 with seed 0 (xxhash.com), as `xxhsum -H1` prints it.
//
// It guards against damage and mix-ups, not against an adversary. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace penstock::train {

std::uint64_t checksum64(std::span<const std::uint8_t> bytes);
std::uint64_t checksum64(std::string_view text);

// The same function written out here: used where xxHash's header is missing, and compared with it by the tests.
std::uint64_t plain_checksum64(std::span<const std::uint8_t> bytes);

}  // namespace penstock::train
