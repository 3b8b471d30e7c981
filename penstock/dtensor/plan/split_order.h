// Represents placements as the order in which axes split each dim. Private to this folder.
//
// [S(0), S(0)] splits dim 0 by axis 0 and then by axis 1; [_S(0, n), S(0)] with n ranks on axis 1 splits it
// by axis 1 first. In this form the rule of redistribution is simple: only the last axis of a dim can be
// removed, and a new one is added at the end.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/placement.h"

namespace penstock::detail {

struct AxisSplit {
  int axis = 0;
  // Nonzero for a StridedShard whose factor is not the product of axes to its right: it is kept as is, at the
  // position of its axis.
  std::int64_t literal_factor = 0;
  friend auto operator<=>(const AxisSplit&, const AxisSplit&) = default;
};

struct SplitOrder {
  // Per axis: the pending reduction, if any.
  std::vector<std::optional<PartialOp>> partial;
  // Per tensor dim: the axes that split it, first to last.
  std::vector<std::vector<AxisSplit>> splits;

  SplitOrder(const Placements& placements, const std::vector<std::int64_t>& mesh_shape,
             std::size_t tensor_ndim);
  Placements placements(const std::vector<std::int64_t>& mesh_shape) const;
  // Returns the dim that an axis splits, if any.
  std::optional<std::size_t> dim_of(int axis) const;

  friend auto operator<=>(const SplitOrder&, const SplitOrder&) = default;
};

}  // namespace penstock::detail
