// The position of the largest or smallest element of a dim. If the dim is split, each rank finds its own, and
// all compare: the communication has the size of the result, not of the dim.
#include <ATen/ATen.h>

#include <limits>
#include <string>

#include "penstock/comm/group/operators.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/tensor_subclass.h"

namespace penstock::detail {
namespace {

constexpr std::int64_t kNowhere = std::numeric_limits<std::int64_t>::max();

struct Extreme {
  at::Tensor value, index;  // with the reduced dim, of size 1
};

Extreme extreme_here(const LocalContext& context, const at::Tensor& local, std::int64_t dim, bool largest) {
  if (local.size(dim) == 0) {
    std::vector<std::int64_t> shape = local.sizes().vec();
    shape[static_cast<std::size_t>(dim)] = 1;
    return {local.new_full(shape,
                           largest ? lowest_value(local.scalar_type()) : highest_value(local.scalar_type())),
            local.new_full(shape, kNowhere, local.options().dtype(at::kLong))};
  }
  auto [value, position] = largest ? at::max(local, dim, true) : at::min(local, dim, true);
  // From positions in the local part to positions in the whole tensor.
  std::vector<at::Tensor> indices;
  const auto segments = local_segments(context.call.inputs[0].whole.shape, context.call.mesh_shape,
                                       context.call.coordinate, context.inputs[0]);
  for (const Segment& segment : segments[static_cast<std::size_t>(dim)])
    indices.push_back(at::arange(segment.offset, segment.offset + segment.length, position.options()));
  return {value.contiguous(), at::cat(indices).index_select(0, position.flatten()).view(position.sizes())};
}

// The best of all ranks along an axis; the first of equal ones, and NaN above all, as in one process.
void compare_along(const comm::Group& group, Extreme& mine, bool largest) {
  const auto gather = [&](const at::Tensor& tensor) {
    if (is_wrapper(tensor))
      return comm::functional::wait_tensor(
          comm::functional::all_gather(tensor.contiguous().unsqueeze(0), group));
    std::vector<std::int64_t> shape = tensor.sizes().vec();
    shape.insert(shape.begin(), group.size());
    at::Tensor all = tensor.new_empty(shape);
    group.all_gather(all, tensor.contiguous(), {.label = "argmax of distributed tensors"}).wait();
    return all;
  };
  const at::Tensor values =
                       gather(mine.value.scalar_type() == at::kBool ? mine.value.to(at::kByte) : mine.value),
                   indices = gather(mine.index);
  const at::Tensor best = largest ? values.amax(0) : values.amin(0);
  const at::Tensor equal = at::where(best.isnan(), values.isnan(), values == best);
  mine.index = indices.masked_fill(equal.logical_not(), kNowhere).amin(0);
  mine.value = best.to(mine.value.scalar_type());
}

Sharding extreme_index(const ShardingCall& call, bool largest) {
  const ShardingInput& self = call.inputs[0];
  std::vector<AxisStrategy> strategies;
  const c10::IValue& given = call.argument("dim");
  if (given.isNone() || self.ndim() == 0) return choose(call, {});
  const std::int64_t reduced = ShardingCall::wrap_dim(given.toInt(), self.ndim());
  const bool keep = call.argument("keepdim").toBool();
  for (std::int64_t dim = 0; dim < self.ndim(); ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{dim};
    if (dim != reduced)
      for (Placement& placement : strategy.outputs) placement = Shard{dim > reduced && !keep ? dim - 1 : dim};
    strategies.push_back(std::move(strategy));
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (axes_splitting(sharding.inputs[0], reduced).empty()) return sharding;
  sharding.local = [reduced, largest](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    Extreme extreme = extreme_here(context, (*stack)[0].toTensor(), reduced, largest);
    for (const int axis : axes_splitting(context.inputs[0], reduced))
      compare_along(context.mesh.group(axis), extreme, largest);
    const auto shape = local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]);
    stack->clear();
    if (context.call.outputs.size() > 1) stack->push_back(extreme.value.reshape(shape));
    stack->push_back(extreme.index.reshape(shape));
  };
  return sharding;
}

}  // namespace

void add_argmax_rules(RuleTable& table) {
  table.add({"argmax", "max.dim"}, [](const ShardingCall& call) { return extreme_index(call, true); });
  table.add({"argmin", "min.dim"}, [](const ShardingCall& call) { return extreme_index(call, false); });
}

}  // namespace penstock::detail
