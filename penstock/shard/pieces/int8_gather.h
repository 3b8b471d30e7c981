// Gathers parameters as 8-bit integers with one scale for every block: a quarter of the bytes of float32, half of those of bfloat16.
//
//   auto int8 = int8_gather();
//   fully_shard(*block, mesh, {.extension = [int8](const std::string&, const at::Tensor& p) { return p.dim() >= 2 ? int8 : nullptr; }});
//
// A block of values v is sent as round(v / s) with s = max|v| / 127 in float32: the gathered parameter is off by at most half of s.
// The shard itself, and so the optimizer, stays exact. Every rank computes with the same gathered values, its own shard included.
// With keep_encoded the gathered parameter stays 8-bit, too: a quarter of the memory of a gathered group, for decoding it in each operator.
#pragma once

#include <cstdint>
#include <memory>

#include "penstock/shard/pieces/extension.h"

namespace penstock {

struct Int8GatherOptions {
  std::int64_t block = 128;   // values that share a scale
  bool keep_encoded = false;  // the gathered parameter stays in 8 bits (encoded_parameter.h)
};

// Throws ValueError for a block of less than 1.
std::shared_ptr<const AllGatherExtension> int8_gather(const Int8GatherOptions& options);
std::shared_ptr<const AllGatherExtension> int8_gather(std::int64_t block = 128);

}  // namespace penstock
