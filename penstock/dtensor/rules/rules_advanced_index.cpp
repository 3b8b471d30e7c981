// x.index({a, None, b}) and index_put_. The index tensors are broadcast against each other; the resulting
// dims replace the indexed dims, or come first if there are unindexed dims between those.
#include <ATen/ATen.h>

#include <algorithm>

#include "penstock/dtensor/tensor/local_index.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

using Numbers = std::vector<std::int64_t>;

struct Indexed {
  struct Index {
    std::int64_t dim;   // of self
    std::size_t input;  // of the call
  };

  explicit Indexed(const ShardingCall& call) : argument(call.argument_index("indices")) {
    const auto list = call.arguments[static_cast<std::size_t>(argument)].toListRef();
    std::int64_t dim = 0;
    for (std::size_t element = 0; element < list.size(); ++element) {
      const int input = call.index_at(argument, static_cast<int>(element));
      if (input < 0) {
        ++dim;
        continue;
      }
      const ShardingInput& index = call.inputs[static_cast<std::size_t>(input)];
      indices.push_back({dim, static_cast<std::size_t>(input)});
      if (index.whole.dtype == at::kBool || index.whole.dtype == at::kByte) {
        masks = true;
        dim += std::max<std::int64_t>(index.ndim(), 1);
        continue;
      }
      ++dim;
      broadcast = at::infer_size(broadcast, index.whole.shape);
    }
    const Numbers& self = call.inputs[0].whole.shape;
    for (std::size_t i = 0; i + 1 < indices.size(); ++i)
      if (indices[i].dim + 1 != indices[i + 1].dim) apart = true;
    front = apart || indices.empty() ? 0 : indices[0].dim;
    // The shape of the result, and the position of the other dims of self in it.
    std::int64_t at = apart ? static_cast<std::int64_t>(broadcast.size()) : 0;
    if (apart) shape = broadcast;
    for (std::int64_t d = 0; d < static_cast<std::int64_t>(self.size()); ++d) {
      if (!apart && !indices.empty() && d == front) {
        shape.insert(shape.end(), broadcast.begin(), broadcast.end());
        at += static_cast<std::int64_t>(broadcast.size());
      }
      if (is_indexed(d)) continue;
      others.push_back({d, at++});
      shape.push_back(self[static_cast<std::size_t>(d)]);
    }
  }

  bool is_indexed(std::int64_t dim) const {
    return std::any_of(indices.begin(), indices.end(), [&](const Index& index) { return index.dim == dim; });
  }

  int argument;
  std::vector<Index> indices;
  bool masks = false, apart = false;
  Numbers broadcast;                                          // shape of all indices together
  std::int64_t front = 0;                                     // position of its dims in the result
  std::vector<std::pair<std::int64_t, std::int64_t>> others;  // dims of self that stay, and their positions
  Numbers shape;                                              // of the result
};

// The indices as positions in the local part, and where all of them are held. `outside` is used for the
// others.
struct LocalIndices {
  c10::IValue list;
  at::Tensor held;
  Numbers padded;  // dims of self that are split
};

LocalIndices localize(const LocalContext& context, const Indexed& indexed, const c10::IValue& list,
                      bool outside_is_end) {
  LocalIndices result;
  c10::List<c10::optional<at::Tensor>> mapped;
  std::size_t next = 0;
  for (const c10::IValue& element : list.toListRef()) {
    if (!element.isTensor() || !element.toTensor().defined()) {
      mapped.push_back(c10::nullopt);
      continue;
    }
    const std::int64_t dim = indexed.indices[next++].dim;
    if (axes_splitting(context.inputs[0], dim).empty()) {
      mapped.push_back(c10::optional<at::Tensor>(element.toTensor()));
      continue;
    }
    const LocalIndex local = local_index(context.call, element.toTensor(), context.call.inputs[0].whole.shape,
                                         context.inputs[0], dim);
    mapped.push_back(c10::optional<at::Tensor>(local.position_or(outside_is_end ? local.length : 0)));
    result.held = result.held.defined() ? result.held.logical_and(local.held) : local.held;
    result.padded.push_back(dim);
  }
  result.list = mapped;
  return result;
}

bool splits_indexed(const Placements& placements, const Indexed& indexed) {
  return std::any_of(placements.begin(), placements.end(), [&](const Placement& placement) {
    return placement.splits() && indexed.is_indexed(placement.dim());
  });
}

// Masks among the indices are rejected earlier, because the shape of the result would be unknown.
Sharding index(const ShardingCall& call) {
  const Indexed indexed(call);
  std::vector<AxisStrategy> strategies;
  for (const auto& [dim, place] : indexed.others) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Shard{dim};
    strategy.outputs[0] = Shard{place};
    strategies.push_back(std::move(strategy));
  }
  for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(indexed.broadcast.size()); ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    for (const Indexed::Index& index : indexed.indices)
      if (const auto own = broadcast_dim(call.inputs[index.input].whole.shape, dim, indexed.broadcast))
        strategy.inputs[index.input] = Shard{*own};
    strategy.outputs[0] = Shard{indexed.front + dim};
    strategies.push_back(std::move(strategy));
  }
  // Elements that another rank holds are zero here, so the results are partial sums.
  if (call.inputs[0].whole.dtype != at::kBool)
    for (const Indexed::Index& index : indexed.indices) {
      AxisStrategy strategy = replicated_strategy(call);
      strategy.inputs[0] = Shard{index.dim};
      strategy.outputs[0] = Partial{};
      strategies.push_back(std::move(strategy));
    }
  for (const PartialOp kind : partial_kinds(call)) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (!splits_indexed(sharding.inputs[0], indexed)) return sharding;
  sharding.local = [indexed](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    const at::Tensor self = (*stack)[0].toTensor();
    const LocalIndices local =
        localize(context, indexed, (*stack)[static_cast<std::size_t>(indexed.argument)], false);
    const bool nothing = std::any_of(local.padded.begin(), local.padded.end(),
                                     [&](std::int64_t dim) { return self.size(dim) == 0; });
    if (nothing) {
      at::Tensor zeros =
          self.new_zeros(local_shape(context.call, context.call.outputs[0].shape, context.outputs[0]));
      stack->clear();
      stack->push_back(std::move(zeros));
      return;
    }
    (*stack)[static_cast<std::size_t>(indexed.argument)] = local.list;
    op.callBoxed(stack);
    const at::Tensor result = stack->back().toTensor();
    Numbers shape = local.held.sizes().vec();
    shape.resize(
        shape.size() + static_cast<std::size_t>(result.dim() - indexed.front) - indexed.broadcast.size(), 1);
    stack->back() = result.masked_fill(local.held.logical_not().reshape(shape), 0);
  };
  return sharding;
}

// x[mask] = v: the mask is placed like the dims that it covers.
void add_mask_strategies(const ShardingCall& call, const Indexed& indexed,
                         std::vector<AxisStrategy>& strategies) {
  const Indexed::Index& mask = indexed.indices[0];
  for (std::int64_t dim = 0; dim < call.inputs[0].ndim(); ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] = Shard{dim};
    if (dim >= mask.dim && dim < mask.dim + call.inputs[mask.input].ndim())
      strategy.inputs[mask.input] = Shard{dim - mask.dim};
    strategies.push_back(std::move(strategy));
  }
  // A partial value is written into a partial tensor.
  for (const PartialOp kind : partial_kinds(call)) {
    if (kind != PartialOp::Sum && kind != PartialOp::Avg) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] =
        strategy.inputs[static_cast<std::size_t>(call.index_at(call.argument_index("values")))] =
            Partial{kind};
    strategies.push_back(std::move(strategy));
  }
}

// Writes into the local part, with one extra slice along each split dim for what belongs to other ranks.
void put_held(const Indexed& indexed, const LocalContext& context, const c10::OperatorHandle& op,
              Stack* stack) {
  const at::Tensor self = (*stack)[0].toTensor();
  const LocalIndices local =
      localize(context, indexed, (*stack)[static_cast<std::size_t>(indexed.argument)], true);
  at::Tensor padded = self;
  for (const std::int64_t dim : local.padded) {
    Numbers slice = padded.sizes().vec();
    slice[static_cast<std::size_t>(dim)] = 1;
    padded = at::cat({padded, padded.new_zeros(slice)}, dim);
  }
  (*stack)[0] = padded;
  (*stack)[static_cast<std::size_t>(indexed.argument)] = local.list;
  op.callBoxed(stack);
  at::Tensor written = stack->back().toTensor();
  for (const std::int64_t dim : local.padded) written = written.narrow(dim, 0, self.size(dim));
  if (context.call.inputs[0].written) {
    self.copy_(written);
    stack->back() = self;
  } else {
    stack->back() = written.contiguous();
  }
}

Sharding index_put(const ShardingCall& call) {
  const Indexed indexed(call);
  const auto values = static_cast<std::size_t>(call.index_at(call.argument_index("values")));
  const Numbers& values_shape = call.inputs[values].whole.shape;
  const bool adds = call.argument("accumulate").toBool();
  std::vector<AxisStrategy> strategies;
  if (indexed.masks) {
    // Several values for a mask are assigned in its order, which is only known for the whole mask.
    if (indexed.indices.size() == 1 && call.inputs[values].whole.numel() == 1 &&
        call.inputs[values].ndim() == 0)
      add_mask_strategies(call, indexed, strategies);
    return choose(call, std::move(strategies));
  }
  const auto value_placement = [&](std::int64_t place) {
    const auto own = broadcast_dim(values_shape, place, indexed.shape);
    return own ? Placement(Shard{*own}) : Placement();
  };
  const bool fits = values_shape.size() <= indexed.shape.size();
  for (const auto& [dim, place] : indexed.others) {
    if (!fits) break;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] = Shard{dim};
    strategy.inputs[values] = value_placement(place);
    strategies.push_back(std::move(strategy));
  }
  if (adds && fits)
    for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(indexed.broadcast.size()); ++dim) {
      AxisStrategy strategy = replicated_strategy(call);
      for (const Indexed::Index& index : indexed.indices)
        if (const auto own = broadcast_dim(call.inputs[index.input].whole.shape, dim, indexed.broadcast))
          strategy.inputs[index.input] = Shard{*own};
      strategy.inputs[values] = value_placement(indexed.front + dim);
      strategy.inputs[0] = strategy.outputs[0] = Partial{};
      strategies.push_back(std::move(strategy));
    }
  for (const Indexed::Index& index : indexed.indices) {
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] = Shard{index.dim};
    strategies.push_back(std::move(strategy));
  }
  for (const PartialOp kind : partial_kinds(call)) {
    if (adds && kind != PartialOp::Sum && kind != PartialOp::Avg) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = strategy.outputs[0] = strategy.inputs[values] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (splits_indexed(sharding.inputs[0], indexed))
    sharding.local = [indexed](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
      put_held(indexed, context, op, stack);
    };
  return sharding;
}

}  // namespace

void add_advanced_index_rules(RuleTable& table) {
  table.add({"index.Tensor", "_unsafe_index.Tensor"}, index);
  table.add({"index_put", "_index_put_impl_", "_unsafe_index_put"}, index_put);
}

}  // namespace penstock::detail
