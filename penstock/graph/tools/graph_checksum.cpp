#define XXH_INLINE_ALL  // header-only, nothing to link
#include <xxhash.h>

#include "penstock/graph/tools/graph_file.h"

namespace penstock::graph::detail {

std::uint64_t graph_checksum(std::span<const std::uint8_t> bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

}  // namespace penstock::graph::detail
