#include "penstock/shard_options.h"

#include <ATen/ATen.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/shard/pieces/piece_copy.h"

namespace penstock {
namespace {

class Int8Gather final : public AllGatherExtension {
 public:
  explicit Int8Gather(const Int8GatherOptions& options)
      : block_(options.block), keep_encoded_(options.keep_encoded) {
    if (block_ < 1) throw ValueError(describe("int8_gather: block", std::to_string(block_), "1 or more"));
  }

  bool keeps_encoded() const override { return keep_encoded_; }

  // Scales first, for alignment.
  std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType) const override {
    return blocks(numel) * 4 + numel;
  }

  void encode(const at::Tensor& shard, const at::Tensor& bytes) const override {
    const std::int64_t numel = shard.numel();
    if (numel == 0) return;
    const at::Tensor rows = in_blocks(shard.to(at::kFloat));
    const at::Tensor scale = rows.abs().amax({1}, true) / 127.0;
    // A block of zeros has no scale; any value works.
    const at::Tensor whole = (rows / at::where(scale == 0, at::ones_like(scale), scale)).round_();
    scales(bytes, numel).copy_(scale.view({-1}));
    values(bytes, numel).copy_(whole.view({-1}).narrow(0, 0, numel));
  }

  void decode(const at::Tensor& bytes, const at::Tensor& piece) const override {
    const std::int64_t numel = piece.numel();
    if (numel == 0) return;
    const at::Tensor rows = in_blocks(values(bytes, numel).to(at::kFloat));
    piece.copy_((rows * scales(bytes, numel).view({-1, 1})).view({-1}).narrow(0, 0, numel));
  }

 private:
  std::int64_t blocks(std::int64_t numel) const { return (numel + block_ - 1) / block_; }
  at::Tensor scales(const at::Tensor& bytes, std::int64_t numel) const {
    return typed_part(bytes, 0, at::kFloat, {blocks(numel)});
  }
  at::Tensor values(const at::Tensor& bytes, std::int64_t numel) const {
    return typed_part(bytes, blocks(numel) * 4, at::kChar, {numel});
  }
  at::Tensor in_blocks(const at::Tensor& flat) const {
    const std::int64_t missing = blocks(flat.numel()) * block_ - flat.numel();
    return (missing > 0 ? at::constant_pad_nd(flat, {0, missing}) : flat).view({-1, block_});
  }

  std::int64_t block_;
  bool keep_encoded_;
};

}  // namespace

std::shared_ptr<const AllGatherExtension> int8_gather(const Int8GatherOptions& options) {
  return std::make_shared<Int8Gather>(options);
}
std::shared_ptr<const AllGatherExtension> int8_gather(std::int64_t block) {
  return int8_gather({.block = block, .keep_encoded = false});
}

}  // namespace penstock
