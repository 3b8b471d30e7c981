#include "penstock/shard/layout/shard_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

ShardLayout::ShardLayout(std::vector<std::int64_t> shape, std::int64_t dim, int ranks)
    : shape_(std::move(shape)), dim_(dim), ranks_(ranks) {
  const auto ndim = static_cast<std::int64_t>(shape_.size());
  if (ranks < 1)
    throw ValueError(describe("number of ranks that share a parameter", std::to_string(ranks), "1 or more"));
  if (ndim == 0) {
    if (ranks > 1)
      throw ValueError(describe("a parameter to be sharded", "a 0-dim tensor",
                                "at least one dim to cut along",
                                "make it a tensor of shape [1], or add it to ShardOptions::ignored"));
    dim_ = 0;
    return;
  }
  if (dim < -ndim || dim >= ndim)
    throw ValueError(
        describe("the dim to shard", std::to_string(dim),
                 fmt::format("{} to {}, for the shape [{}]", -ndim, ndim - 1, fmt::join(shape_, ", "))));
  if (dim_ < 0) dim_ += ndim;
  const auto at = static_cast<std::size_t>(dim_);
  size_ = shape_[at];
  chunk_ = (size_ + ranks - 1) / ranks;
  for (std::size_t i = 0; i < shape_.size(); ++i)
    (i < at ? outer_ : i > at ? inner_ : numel_) *= i == at ? 1 : shape_[i];
  others_ = outer_ * inner_;
  numel_ = others_ * size_;
}

std::int64_t ShardLayout::offset(int rank) const { return std::min(size_, chunk_ * rank); }

std::int64_t ShardLayout::length(int rank) const {
  return std::min(size_, chunk_ * (rank + 1)) - offset(rank);
}

std::vector<std::int64_t> ShardLayout::piece_shape(int rank) const {
  std::vector<std::int64_t> piece = shape_;
  if (!piece.empty()) piece[static_cast<std::size_t>(dim_)] = length(rank);
  return piece;
}

}  // namespace penstock
