// What a parameter's shard becomes on its way to the other ranks.
//
// An extension encodes each rank's shard into bytes and decodes the bytes of every rank into its piece of the gathered parameter:
// quantized gathers (int8_gather.h), compression, formats of your own. It is attached to a parameter by ShardOptions::extension.
//
// All ranks must send equally much, so the number of bytes follows from the padded size of a shard alone, which every rank knows;
// shards that are shorter than others (the dim does not divide) are padded with zeros before they are encoded. So no rank can come
// to a size that others do not expect. An error in `encode` is an error of this rank, which every other rank is told.
// Thread rule: const, called by the thread that runs forward or backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  // How many bytes the padded shard of `numel` elements takes; the same on every rank.
  virtual std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType dtype) const = 0;

  // `shard`: [numel], the padded shard in the parameter's own dtype. `bytes`: [encoded_bytes], to be filled completely.
  virtual void encode(const at::Tensor& shard, const at::Tensor& bytes) const = 0;

  // `bytes`: what one rank encoded. `piece`: [numel] elements of the gathered parameter's dtype; padding is cut off afterwards.
  virtual void decode(const at::Tensor& bytes, const at::Tensor& piece) const = 0;
};

}  // namespace penstock
