// What a parameter's shard becomes on its way to the other ranks, and what the gathered parameter is.
//
// An extension encodes each rank's shard into bytes and decodes the bytes of every rank into its piece of the gathered parameter:
// quantized gathers (int8_gather.h), compression, formats of your own. It is attached to a parameter by ShardOptions::extension.
//
// All ranks must send equally much, so the number of bytes follows from the padded size of a shard alone, which every rank knows;
// shards that are shorter than others (the dim does not divide) are padded with zeros before they are encoded. So no rank can come
// to a size that others do not expect. An error in `encode` is an error of this rank, which every other rank is told.
//
// While it is gathered the parameter is a plain tensor, decoded, or, with keeps_encoded(), a tensor subclass over the bytes as they came:
// the memory of a gathered group is then that of its encoded form. Its gradient is a plain tensor either way.
// Thread rule: const, called by the thread that runs forward or backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "penstock/shard/layout/shard_layout.h"

namespace penstock {

class AllGatherExtension;

// One gathered parameter as the ranks encoded it.
struct GatheredBytes {
  at::Tensor rows;     // [ranks, encoded_bytes]; every gather fills this memory, between gathers there is none
  ShardLayout layout;  // how the pieces make up the parameter
  at::ScalarType dtype;  // of the gathered parameter
  std::shared_ptr<const AllGatherExtension> extension;
};

class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  // How many bytes the padded shard of `numel` elements takes; the same on every rank.
  virtual std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType dtype) const = 0;

  // `shard`: [numel], the padded shard in the parameter's own dtype. `bytes`: [encoded_bytes], to be filled completely.
  virtual void encode(const at::Tensor& shard, const at::Tensor& bytes) const = 0;

  // `bytes`: what one rank encoded. `piece`: [numel] elements of the gathered parameter's dtype; padding is cut off afterwards.
  virtual void decode(const at::Tensor& bytes, const at::Tensor& piece) const = 0;

  // Whether the gathered parameter keeps the bytes as they came. The same on every rank. Not for distributed parameters.
  virtual bool keeps_encoded() const { return false; }

  // With keeps_encoded(), called once per parameter: the tensor that the parameter is while it is gathered, a subclass (torch/wrapper.h) of
  // shape layout.shape() and dtype `dtype`. Its payload must return parts of `rows` from inner_tensors(), and its views must be
  // made with `viewed`, so that backward finds the group they belong to. Default: make_encoded_parameter (encoded_parameter.h).
  virtual at::Tensor make_gathered(const GatheredBytes& bytes) const;
};

}  // namespace penstock
