// Views that split and join dims. A local part must remain a box of whole rows of the new shape, or strided
// rows of it.
#include <algorithm>

#include "penstock/dtensor/plan/split_order.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

using Numbers = std::vector<std::int64_t>;

// Dims of the old shape that become dims of the new one; dims of size 1 are omitted.
struct DimGroup {
  Numbers from, to;
};

std::vector<DimGroup> group_dims(const Numbers& from, const Numbers& to) {
  std::vector<DimGroup> groups;
  std::size_t i = 0, j = 0;
  const auto skip_ones = [](const Numbers& shape, std::size_t& at) {
    while (at < shape.size() && shape[at] == 1) ++at;
  };
  for (skip_ones(from, i), skip_ones(to, j); i < from.size() && j < to.size();
       skip_ones(from, i), skip_ones(to, j)) {
    DimGroup group{{static_cast<std::int64_t>(i)}, {static_cast<std::int64_t>(j)}};
    std::int64_t a = from[i++], b = to[j++];
    while (a != b) {
      if (a < b) {
        if (from[i] != 1) group.from.push_back(static_cast<std::int64_t>(i));
        a *= from[i++];
      } else {
        if (to[j] != 1) group.to.push_back(static_cast<std::int64_t>(j));
        b *= to[j++];
      }
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

class ViewLayout {
 public:
  explicit ViewLayout(const ShardingCall& call)
      : call_(call),
        from_(call.inputs[0].whole.shape),
        to_(call.outputs[0].shape),
        in_(call.inputs[0].placements),
        out_(call.axes()),
        order_(in_, call.mesh_shape, from_.size()) {}

  Sharding run() {
    for (std::size_t axis = 0; axis < call_.axes(); ++axis)
      if (in_[axis].is_partial()) out_[axis] = in_[axis];
    if (from_ == to_) {
      out_ = in_;
    } else if (call_.outputs[0].numel() == 0) {
      replicate_dims(all_dims());
    } else {
      Numbers grouped;
      for (const DimGroup& group : group_dims(from_, to_)) {
        map_group(group);
        grouped.insert(grouped.end(), group.from.begin(), group.from.end());
      }
      // Splits of dims of size 1 leave some ranks empty, which no dim of the new shape can express.
      Numbers rest;
      for (const std::int64_t dim : all_dims())
        if (std::find(grouped.begin(), grouped.end(), dim) == grouped.end()) rest.push_back(dim);
      replicate_dims(rest);
    }
    Sharding sharding;
    sharding.inputs = {in_};
    sharding.outputs = {out_};
    return sharding;
  }

 private:
  std::int64_t ranks(int axis) const { return call_.mesh_shape[static_cast<std::size_t>(axis)]; }
  std::int64_t from(std::int64_t dim) const { return from_[static_cast<std::size_t>(dim)]; }
  std::int64_t to(std::int64_t dim) const { return to_[static_cast<std::size_t>(dim)]; }
  const std::vector<AxisSplit>& splits(std::int64_t dim) const {
    return order_.splits[static_cast<std::size_t>(dim)];
  }

  Numbers all_dims() const {
    Numbers dims;
    for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(from_.size()); ++dim) dims.push_back(dim);
    return dims;
  }

  void replicate_dims(const Numbers& dims) {
    for (const std::int64_t dim : dims)
      for (const AxisSplit& split : splits(dim)) in_[static_cast<std::size_t>(split.axis)] = Replicate{};
  }

  // The placement of an axis, moved to another dim.
  static Placement moved(const Placement& placement, std::int64_t dim) {
    if (placement.is_strided_shard()) return StridedShard{dim, placement.split_factor()};
    return Shard{dim};
  }

  // The number of pieces that the splits of `dim` make; 0 if one of them is a literal strided split.
  std::int64_t plain_pieces(std::int64_t dim) const {
    std::int64_t pieces = 1;
    for (const AxisSplit& split : splits(dim)) {
      if (split.literal_factor != 0) return 0;
      pieces *= ranks(split.axis);
    }
    return pieces;
  }

  void move_all(std::int64_t dim, std::int64_t to_dim) {
    for (const AxisSplit& split : splits(dim))
      out_[static_cast<std::size_t>(split.axis)] = moved(in_[static_cast<std::size_t>(split.axis)], to_dim);
  }

  void map_group(const DimGroup& group) {
    const bool split = std::any_of(group.from.begin(), group.from.end(),
                                   [&](std::int64_t dim) { return !splits(dim).empty(); });
    if (!split) return;
    const std::int64_t first = group.from[0], target = group.to[0];
    if (group.from.size() == 1 && group.to.size() == 1) return move_all(first, target);
    if (group.from.size() == 1 && map_strided_to_inner(group)) return;
    const std::int64_t pieces = plain_pieces(first);
    const bool even = pieces > 0 && from(first) % pieces == 0 && to(target) % pieces == 0;
    if (!even) return replicate_dims(group.from);
    if (group.to.size() == 1 && map_inner_to_strided(group, pieces)) return;
    move_all(first, target);
    replicate_dims(Numbers(group.from.begin() + 1, group.from.end()));
  }

  // [B, T] split along T, joined to [B * T]: each of B pieces is split.
  bool map_inner_to_strided(const DimGroup& group, std::int64_t pieces) {
    std::int64_t inner = 0;
    const AxisSplit* split = nullptr;
    for (std::size_t k = 1; k < group.from.size(); ++k) {
      const auto& here = splits(group.from[k]);
      if (here.empty()) continue;
      if (split || here.size() > 1 || here[0].literal_factor != 0) return false;
      split = &here[0];
      inner = static_cast<std::int64_t>(k);
    }
    if (!split) return false;
    for (const AxisSplit& outer : splits(group.from[0]))
      if (outer.axis > split->axis) return false;  // it would have to split after the axes to its left
    std::int64_t factor = from(group.from[0]) / pieces, below = 1;
    for (std::size_t k = 1; k < group.from.size(); ++k) {
      if (static_cast<std::int64_t>(k) < inner) factor *= from(group.from[k]);
      if (static_cast<std::int64_t>(k) > inner) below *= from(group.from[k]);
    }
    if (below > 1 && from(group.from[static_cast<std::size_t>(inner)]) % ranks(split->axis) != 0)
      return false;
    move_all(group.from[0], group.to[0]);
    out_[static_cast<std::size_t>(split->axis)] =
        factor == 1 ? Placement(Shard{group.to[0]}) : Placement(StridedShard{group.to[0], factor});
    return true;
  }

  // The reverse.
  bool map_strided_to_inner(const DimGroup& group) {
    const auto& order = splits(group.from[0]);
    if (order.back().literal_factor == 0) return false;
    const AxisSplit& strided = order.back();
    std::int64_t pieces = 1;
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
      if (order[i].literal_factor != 0 || order[i].axis > strided.axis) return false;
      pieces *= ranks(order[i].axis);
    }
    if (from(group.from[0]) % pieces != 0 || to(group.to[0]) % pieces != 0) return false;
    std::int64_t before = to(group.to[0]) / pieces, below = 1;
    std::size_t k = 1;
    while (k < group.to.size() && before < strided.literal_factor) before *= to(group.to[k++]);
    if (before != strided.literal_factor || k >= group.to.size()) return false;
    for (std::size_t i = k + 1; i < group.to.size(); ++i) below *= to(group.to[i]);
    if (below > 1 && to(group.to[k]) % ranks(strided.axis) != 0) return false;
    for (std::size_t i = 0; i + 1 < order.size(); ++i)
      out_[static_cast<std::size_t>(order[i].axis)] =
          moved(in_[static_cast<std::size_t>(order[i].axis)], group.to[0]);
    out_[static_cast<std::size_t>(strided.axis)] = Shard{group.to[k]};
    return true;
  }

  const ShardingCall& call_;
  const Numbers& from_;
  const Numbers& to_;
  Placements in_, out_;
  const SplitOrder order_;
};

// The local part in its new shape; a copy if its strides do not allow a view.
void reshape_local(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const Numbers shape = local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]);
  at::Tensor result = (*stack)[0].toTensor().reshape(shape);
  stack->clear();
  stack->push_back(std::move(result));
}

Sharding view(const ShardingCall& call) {
  Sharding sharding = ViewLayout(call).run();
  sharding.local = reshape_local;
  return sharding;
}

}  // namespace

void add_view_rules(RuleTable& table) {
  table.add({"view", "_unsafe_view", "_reshape_alias", "reshape", "squeeze", "_reshape_copy", "view_copy"},
            view);
}

}  // namespace penstock::detail
