// The checksum of checkpoint blocks: XXH3, 64 bits, seed 0.
#pragma once

#include <cstdint>
#include <span>

namespace penstock::checkpoint {

// Throws ConfigError in a build without xxHash: checkpoints are then neither written nor verified.
std::uint64_t checksum(std::span<const std::uint8_t> bytes);

}  // namespace penstock::checkpoint
