// Checksums of file contents: XXH64 and XXH3 (xxhash.com), both 64 bits wide with seed 0.
//
// They detect damage and mix-ups, not tampering. A build without the xxHash header still computes XXH64, but
// not XXH3.
// Thread safety: pure functions, callable from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace penstock {

// XXH64, as `xxhsum -H1` prints it. Available in every build.
std::uint64_t checksum64(std::span<const std::uint8_t> bytes);
std::uint64_t checksum64(std::string_view text);

// The portable implementation of XXH64 that builds without xxHash use. Tests compare it with xxHash.
std::uint64_t plain_checksum64(std::span<const std::uint8_t> bytes);

// XXH3. Throws ConfigError in a build without xxHash; the message starts with `user`, such as "checkpoints".
std::uint64_t xxh3_checksum64(std::span<const std::uint8_t> bytes, std::string_view user);

// Throws the same ConfigError in a build without xxHash, for formats that are only supported with it.
void require_xxhash(std::string_view user);

}  // namespace penstock
