// Placements as the order in which axes split each dim. Private to this folder.
//
// [S(0), S(0)] splits dim 0 by axis 0 and then by axis 1; [_S(0, n), S(0)] with n ranks on axis 1 by axis 1 first. In this
// form the one rule of redistribution is plain: only the last axis of a dim can be taken off, and one is added at the end.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/placement.h"

namespace penstock::detail {

struct AxisSplit {
  int axis = 0;
  // A StridedShard whose factor is not the product of axes to its right: it stands for itself, where its axis stands.
  std::int64_t literal_factor = 0;
  friend auto operator<=>(const AxisSplit&, const AxisSplit&) = default;
};

struct SplitOrder {
  // Per axis: nothing, or the reduction that is still to be done.
  std::vector<std::optional<PartialOp>> partial;
  // Per tensor dim: who splits it, first to last.
  std::vector<std::vector<AxisSplit>> splits;

  SplitOrder(const Placements& placements, const std::vector<std::int64_t>& mesh_shape, std::size_t tensor_ndim);
  Placements placements(const std::vector<std::int64_t>& mesh_shape) const;
  // The dim that an axis splits, if it does.
  std::optional<std::size_t> dim_of(int axis) const;

  friend auto operator<=>(const SplitOrder&, const SplitOrder&) = default;
};

}  // namespace penstock::detail
