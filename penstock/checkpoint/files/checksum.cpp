#include "penstock/checkpoint/files/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace penstock::checkpoint {

std::uint64_t checksum(std::span<const std::uint8_t> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace penstock::checkpoint
