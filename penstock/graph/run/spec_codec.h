// Structures of arguments and results as bytes.
#pragma once

#include <span>
#include <vector>

#include "penstock/graph/cache/byte_stream.h"
#include "penstock/pytree.h"

namespace penstock::graph {

Bytes encode_specs(const std::vector<TreeSpec>& specs);
// Throws ValueError for bytes that encode_specs has not written.
std::vector<TreeSpec> decode_specs(std::span<const std::uint8_t> bytes);

}  // namespace penstock::graph
