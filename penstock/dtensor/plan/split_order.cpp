#include "penstock/dtensor/plan/split_order.h"

#include <algorithm>

namespace penstock::detail {

SplitOrder::SplitOrder(const Placements& placements, const std::vector<std::int64_t>& mesh_shape,
                       std::size_t tensor_ndim)
    : partial(placements.size()), splits(tensor_ndim) {
  // From the right: the axes to the right of a strided shard are already in order, and its factor tells how
  // many of them come before it.
  for (std::size_t axis = placements.size(); axis-- > 0;) {
    const Placement& placement = placements[axis];
    if (placement.is_partial()) partial[axis] = placement.partial_op();
    if (!placement.splits()) continue;
    auto& order = splits[static_cast<std::size_t>(placement.dim())];
    const std::int64_t factor = placement.is_strided_shard() ? placement.split_factor() : 1;
    std::int64_t pieces = 1;
    auto place = order.begin();
    while (place != order.end() && place->literal_factor == 0 && pieces < factor)
      pieces *= mesh_shape[static_cast<std::size_t>((place++)->axis)];
    if (pieces == factor)
      order.insert(place, {static_cast<int>(axis), 0});
    else
      order.insert(order.begin(), {static_cast<int>(axis), factor});
  }
}

Placements SplitOrder::placements(const std::vector<std::int64_t>& mesh_shape) const {
  Placements result(partial.size());
  for (std::size_t axis = 0; axis < partial.size(); ++axis)
    if (partial[axis]) result[axis] = Partial{*partial[axis]};
  for (std::size_t dim = 0; dim < splits.size(); ++dim)
    for (std::size_t i = 0; i < splits[dim].size(); ++i) {
      const AxisSplit& split = splits[dim][i];
      std::int64_t factor = std::max<std::int64_t>(split.literal_factor, 1);
      if (split.literal_factor == 0)
        for (std::size_t before = 0; before < i; ++before)
          if (splits[dim][before].axis > split.axis)
            factor *= mesh_shape[static_cast<std::size_t>(splits[dim][before].axis)];
      const auto d = static_cast<std::int64_t>(dim);
      auto& placement = result[static_cast<std::size_t>(split.axis)];
      if (factor > 1)
        placement = StridedShard{d, factor};
      else
        placement = Shard{d};
    }
  return result;
}

std::optional<std::size_t> SplitOrder::dim_of(int axis) const {
  for (std::size_t dim = 0; dim < splits.size(); ++dim)
    for (const AxisSplit& split : splits[dim])
      if (split.axis == axis) return dim;
  return std::nullopt;
}

}  // namespace penstock::detail
