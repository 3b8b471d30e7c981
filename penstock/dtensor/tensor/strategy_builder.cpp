#include "penstock/dtensor/tensor/strategy_builder.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/errors.h"
#include "penstock/fake.h"

namespace penstock::detail {

StrategyBuilder::StrategyBuilder(const ShardingCall& call)
    : call_(call), strategy_(replicated_strategy(call)) {}

StrategyBuilder& StrategyBuilder::in(std::string_view argument, const Placement& placement) {
  if (!call_.has_argument(argument)) return *this;
  if (const int index = call_.index_at(call_.argument_index(argument)); index >= 0)
    strategy_.inputs[static_cast<std::size_t>(index)] = placement;
  return *this;
}

StrategyBuilder& StrategyBuilder::out(int output, const Placement& placement) {
  if (output >= 0 && output < static_cast<int>(call_.outputs.size()))
    strategy_.outputs[static_cast<std::size_t>(output)] = placement;
  return *this;
}

AxisStrategy StrategyBuilder::build() {
  std::size_t output = 0;
  for (const ReturnAlias& alias : call_.traits.returns) {
    if (output >= call_.outputs.size()) break;
    if (alias.kind == ReturnAlias::Kind::Same)
      if (const int index = call_.index_at(alias.argument); index >= 0)
        strategy_.inputs[static_cast<std::size_t>(index)] = strategy_.outputs[output];
    ++output;
  }
  return strategy_;
}

const ShardingInput* input_named(const ShardingCall& call, std::string_view argument) {
  return call.has_argument(argument) ? call.input_at(call.argument_index(argument)) : nullptr;
}

std::vector<int> output_positions(const std::vector<bool>& given) {
  std::vector<int> positions;
  int next = 0;
  for (const bool one : given) positions.push_back(one ? next++ : -1);
  return positions;
}

std::int64_t plain_parts(const ShardingCall& call, Sharding& sharding, std::string_view argument,
                         std::int64_t dim) {
  const Placements placements =
      sharding.inputs[static_cast<std::size_t>(call.index_at(call.argument_index(argument)))];
  std::int64_t parts = 1;
  for (const int split : axes_splitting(placements, dim)) {
    const auto axis = static_cast<std::size_t>(split);
    parts *= call.mesh_shape[axis];
    for (auto* tensors : {&sharding.inputs, &sharding.outputs})
      for (Placements& each : *tensors)
        if (each[axis].is_strided_shard()) each[axis] = Shard{each[axis].dim()};
  }
  return parts;
}

void skip_where_empty(const ShardingCall& call, Sharding& sharding,
                      std::initializer_list<std::string_view> arguments, const std::vector<bool>& given) {
  bool empty = false;
  for (const std::string_view name : arguments) {
    const ShardingInput* input = input_named(call, name);
    if (!input || input->whole.numel() == 0) continue;
    const auto shape =
        local_shape(call, input->whole.shape,
                    sharding.inputs[static_cast<std::size_t>(call.index_at(call.argument_index(name)))]);
    empty |= std::find(shape.begin(), shape.end(), 0) != shape.end();
  }
  if (!empty) return;
  sharding.local = [given](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    std::vector<at::Tensor> results(given.size());
    std::size_t output = 0;
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (!given[i]) continue;
      const GlobalGeometry& whole = context.call.outputs[output];
      results[i] = at::zeros(local_shape(context.call, whole.shape, context.outputs[output]),
                             at::TensorOptions(whole.dtype).device(whole.device));
      ++output;
    }
    store_results(context, stack, results);
  };
}

at::Tensor local_argument(const LocalContext& context, const Stack& stack, std::string_view argument) {
  if (!context.call.has_argument(argument)) return {};
  const c10::IValue& value = stack[static_cast<std::size_t>(context.call.argument_index(argument))];
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

Placements decided(const LocalContext& context, std::string_view argument) {
  if (context.call.has_argument(argument))
    if (const int index = context.call.index_at(context.call.argument_index(argument)); index >= 0)
      return context.inputs[static_cast<std::size_t>(index)];
  return Placements(context.call.axes());
}

std::vector<int> axes_of(const LocalContext& context, std::string_view argument, std::int64_t dim) {
  return axes_splitting(decided(context, argument), dim);
}

void store_results(const LocalContext& context, Stack* stack, const std::vector<at::Tensor>& results) {
  Stack given;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const ReturnAlias& alias = context.call.traits.returns[i];
    if (alias.kind == ReturnAlias::Kind::Same)
      given.emplace_back((*stack)[static_cast<std::size_t>(alias.argument)].toTensor().copy_(results[i]));
    else
      given.emplace_back(results[i]);
  }
  *stack = std::move(given);
}

at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

std::vector<Segment> held_segments(const LocalContext& context, const std::vector<std::int64_t>& shape,
                                   const Placements& placements, std::int64_t dim) {
  return local_segments(shape, context.call.mesh_shape, context.call.coordinate,
                        placements)[static_cast<std::size_t>(dim)];
}

void check_indices(const at::Tensor& indices, const at::Tensor& counts, std::int64_t size,
                   std::string_view what) {
  at::Tensor bad = indices.lt(0).logical_or_(indices.ge(size));
  if (counts.defined()) bad.logical_and_(counts);
  // The values of a captured tensor are checked when the graph runs.
  if (!indices.is_cpu() || is_fake(indices)) return at::_assert_async(bad.any().logical_not());
  if (!bad.any().item<bool>()) return;
  throw ValueError(describe(what, fmt::format("{}", indices.masked_select(bad)[0].item<std::int64_t>()),
                            fmt::format("0 to {}", size - 1),
                            "check how the indices are computed, and the size of the dim they select from"));
}

}  // namespace penstock::detail
