#include "penstock/errors.h"
#include "penstock/graph/tools/graph_file.h"

namespace penstock::graph::detail {

std::uint64_t graph_checksum(std::span<const std::uint8_t>) {
  throw ConfigError("graph files: this build has no xxHash; install its header (Debian: libxxhash-dev) and rebuild");
}

}  // namespace penstock::graph::detail
