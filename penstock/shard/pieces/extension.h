// Customizes how a parameter's shard is sent to the other ranks, and what the gathered parameter is.
//
// An extension encodes each rank's shard into bytes and decodes the bytes of every rank into its piece of the
// gathered parameter: quantized gathers (int8_gather.h), compression, custom formats. It is attached to a
// parameter by ShardOptions::extension.
//
// All ranks must send the same number of bytes, so this number depends only on the padded size of a shard,
// which every rank knows; shorter shards (the dim does not divide evenly) are padded with zeros before they
// are encoded. Hence ranks cannot disagree about sizes. An error in `encode` fails on this rank and is
// reported to every other rank.
//
// While gathered, the parameter is a plain decoded tensor or, with keeps_encoded(), a tensor subclass over
// the received bytes: a gathered group then uses only the memory of its encoded form. Its gradient is a plain
// tensor in both cases.
// Thread safety: const; called by the thread that runs forward or backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "penstock/shard/layout/shard_layout.h"

namespace penstock {

class AllGatherExtension;

// One gathered parameter as the ranks encoded it.
struct GatheredBytes {
  at::Tensor rows;     // [ranks, encoded_bytes]; filled by every gather; has no memory between gathers
  ShardLayout layout;  // how the pieces make up the parameter
  at::ScalarType dtype;  // of the gathered parameter
  std::shared_ptr<const AllGatherExtension> extension;
};

class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  // The number of bytes for a padded shard of `numel` elements; the same on every rank.
  virtual std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType dtype) const = 0;

  // `shard`: [numel], the padded shard in the parameter's own dtype. `bytes`: [encoded_bytes], to be filled
  // completely.
  virtual void encode(const at::Tensor& shard, const at::Tensor& bytes) const = 0;

  // `bytes`: what one rank encoded. `piece`: [numel] elements of the gathered parameter's dtype; padding is
  // cut off afterwards.
  virtual void decode(const at::Tensor& bytes, const at::Tensor& piece) const = 0;

  // Whether the gathered parameter keeps the received bytes. The same on every rank. Not for distributed
  // parameters.
  virtual bool keeps_encoded() const { return false; }

  // With keeps_encoded(), called once per parameter: returns the tensor that represents the gathered
  // parameter, a subclass (torch/wrapper.h) of shape layout.shape() and dtype `dtype`. Its payload must
  // return parts of `rows` from inner_tensors(), and its views must be made with `viewed`, so that backward
  // finds the group they belong to. Default: make_encoded_parameter (encoded_parameter.h).
  virtual at::Tensor make_gathered(const GatheredBytes& bytes) const;
};

}  // namespace penstock
