// How a tensor is cut along one dim into one piece per rank. Arithmetic only.
//
//   7 rows over 3 ranks, dim 0       rank 0: rows 0-2    rank 1: rows 3-5    rank 2: row 6
//   padded: every rank's slot has room for 3 rows, like rank 0's; rank 2 uses the first of them
//
// A piece is ceil(size / ranks) long until nothing is left; later ranks may hold less or nothing. Pieces are
// dense for any dim: a rank's slot in a buffer holds its piece first and padding after it.
#pragma once

#include <cstdint>
#include <vector>

namespace penstock {

class ShardLayout {
 public:
  ShardLayout() = default;
  // `dim` may be negative. Throws ValueError for a dim out of range and for ranks < 1. A 0-dim tensor cannot
  // be cut: it is whole for one rank and a ValueError for several.
  ShardLayout(std::vector<std::int64_t> shape, std::int64_t dim, int ranks);

  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::int64_t dim() const { return dim_; }
  int ranks() const { return ranks_; }
  std::int64_t numel() const { return numel_; }

  // Length along the dim of the full pieces.
  std::int64_t chunk() const { return chunk_; }
  std::int64_t length(int rank) const;
  std::int64_t offset(int rank) const;  // the size of the dim for a rank that holds nothing
  std::vector<std::int64_t> piece_shape(int rank) const;
  std::int64_t piece_numel(int rank) const { return length(rank) * others_; }
  std::vector<std::int64_t> padded_shape() const { return piece_shape(0); }
  std::int64_t padded_numel() const { return chunk_ * others_; }
  bool even() const { return chunk_ * ranks_ == size_; }

  // The tensor as a matrix of blocks: outer() rows, each of size along the dim times inner() elements.
  std::int64_t outer() const { return outer_; }
  std::int64_t inner() const { return inner_; }

 private:
  std::vector<std::int64_t> shape_;
  std::int64_t dim_ = 0, size_ = 1, chunk_ = 1, numel_ = 1;
  std::int64_t outer_ = 1, inner_ = 1, others_ = 1;
  int ranks_ = 1;
};

}  // namespace penstock
