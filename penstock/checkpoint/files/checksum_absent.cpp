// Compiled instead of checksum.cpp if the build found no xxHash. Another checksum would produce files that
// other builds reject.
#include "penstock/errors.h"
#include "penstock/checkpoint/files/checksum.h"

namespace penstock::checkpoint {

std::uint64_t checksum(std::span<const std::uint8_t>) {
  throw ConfigError("checkpoints: this build has no xxHash; install its header (Debian: libxxhash-dev) and rebuild");
}

}  // namespace penstock::checkpoint
