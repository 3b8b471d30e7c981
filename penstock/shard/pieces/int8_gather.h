// Gathers parameters as 8-bit integers with one scale per block: a quarter of the bytes of float32, half of
// those of bfloat16.
//
//   auto int8 = int8_gather();
//   fully_shard(*block, mesh, {.extension = [int8](const std::string&, const at::Tensor& p) {
//     return p.dim() >= 2 ? int8 : nullptr;
//   }});
//
// A block of values v is sent as round(v / s) with s = max|v| / 127 in float32: the error of the gathered
// parameter is at most s/2. The shard itself, and so the optimizer, stays exact. Every rank computes with the
// same gathered values, including its own shard.
// With keep_encoded the gathered parameter stays 8-bit as well: a gathered group uses a quarter of the
// memory, but each operator decodes it.
#pragma once

#include <cstdint>
#include <memory>

#include "penstock/shard/pieces/extension.h"

namespace penstock {

struct Int8GatherOptions {
  std::int64_t block = 128;   // number of values that share a scale
  bool keep_encoded = false;  // the gathered parameter stays in 8 bits (encoded_parameter.h)
};

// Throws ValueError for a block smaller than 1.
std::shared_ptr<const AllGatherExtension> int8_gather(const Int8GatherOptions& options);
std::shared_ptr<const AllGatherExtension> int8_gather(std::int64_t block = 128);

}  // namespace penstock
