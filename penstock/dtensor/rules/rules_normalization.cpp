// Normalizations. Dims that statistics are not computed over may be split; gradients of weight and bias are
// then partial sums. In training, batch normalization of a split batch adds up the statistics of all ranks.
#include <ATen/ATen.h>

#include <algorithm>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"

namespace penstock::detail {
namespace {

// Which gradients are requested: of the input, and of the parameters.
std::vector<bool> output_mask(const ShardingCall& call) {
  if (!call.has_argument("output_mask")) return std::vector<bool>(3, true);
  std::vector<bool> mask;
  for (const c10::IValue& asked : call.argument("output_mask").toListRef()) mask.push_back(asked.toBool());
  return mask;
}

// ---- over the last dims: layer norm, root mean square ----

std::int64_t row_dims(const ShardingCall& call) {
  return input_named(call, "input")->ndim() -
         static_cast<std::int64_t>(call.argument("normalized_shape").toListRef().size());
}

// All results (the output and the statistics, which keep the normalized dims with size 1) are split like the
// rows.
Sharding rows(const ShardingCall& call) {
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < row_dims(call); ++dim) {
    StrategyBuilder strategy(call);
    strategy.in("input", Shard{dim});
    for (std::size_t i = 0; i < call.outputs.size(); ++i) strategy.out(static_cast<int>(i), Shard{dim});
    strategy.add_to(strategies);
  }
  Sharding sharding = choose(call, std::move(strategies));
  skip_where_empty(call, sharding, {"input"}, std::vector<bool>(call.outputs.size(), true));
  return sharding;
}

// The gradient of the input, then of the parameters that are requested and present.
Sharding rows_backward(const ShardingCall& call) {
  auto mask = output_mask(call);
  if (!input_named(call, "weight")) mask[1] = false;
  if (mask.size() > 2 && !input_named(call, "bias")) mask[2] = false;
  const auto place = output_positions(mask);
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < row_dims(call); ++dim) {
    StrategyBuilder strategy(call);
    for (const char* name : {"grad_out", "input", "mean", "rstd"}) strategy.in(name, Shard{dim});
    for (std::size_t i = 1; i < place.size(); ++i) strategy.out(place[i], Partial{});
    strategy.out(place[0], Shard{dim}).add_to(strategies);
  }
  Sharding sharding = choose(call, std::move(strategies));
  skip_where_empty(call, sharding, {"input"}, mask);
  return sharding;
}

// ---- over groups of channels ----

// input (batch, channels, ...), statistics (batch, groups), weight and bias (channels). Channels may be split
// between groups.
std::vector<AxisStrategy> group_strategies(const ShardingCall& call, bool channels, bool backward) {
  std::vector<AxisStrategy> strategies;
  const auto positions = output_positions(output_mask(call));
  for (std::int64_t dim = 0; dim < (channels ? 2 : 1); ++dim) {
    StrategyBuilder strategy(call);
    for (const char* name : {"grad_out", "input", "mean", "rstd"}) strategy.in(name, Shard{dim});
    if (dim == 1) strategy.in("weight", Shard{0}).in("bias", Shard{0});
    strategy.out(positions[0], Shard{dim});
    // Statistics, or gradients of the parameters.
    const Placement parameters = dim == 1 ? Placement(Shard{0}) : Placement(Partial{});
    for (const int place : {positions[1], positions[2]})
      strategy.out(place, backward ? parameters : Placement(Shard{dim}));
    strategy.add_to(strategies);
  }
  return strategies;
}

Sharding group_norm(const ShardingCall& call, bool backward) {
  const std::int64_t groups = call.argument("group").toInt();
  const std::size_t input = static_cast<std::size_t>(call.index_at(call.argument_index("input")));
  Sharding sharding = choose(call, group_strategies(call, true, backward));
  std::int64_t parts = plain_parts(call, sharding, "input", 1);
  if (groups % parts != 0) {
    sharding = choose(call, group_strategies(call, false, backward));
    parts = 1;
  }
  const auto local = local_shape(call, call.inputs[input].whole.shape, sharding.inputs[input]);
  sharding.arguments = {{call.argument_index("N"), local[0]},
                        {call.argument_index("C"), local[1]},
                        {call.argument_index("group"), groups / parts}};
  skip_where_empty(call, sharding, {"input"}, output_mask(call));
  return sharding;
}

// ---- over the batch: input (batch, channels, ...) ----

// Running statistics are written, though no schema declares it: their placement must not change.
ShardingCall with_written_statistics(const ShardingCall& call) {
  ShardingCall marked = call;
  for (const char* name : {"running_mean", "running_var"})
    if (call.has_argument(name))
      if (const int index = call.index_at(call.argument_index(name)); index >= 0)
        marked.inputs[static_cast<std::size_t>(index)].written = true;
  return marked;
}

// This rank's part as (channels, everything else), in the dtype of the statistics, and the number of elements
// per channel on all ranks together.
struct Channels {
  Channels(const LocalContext& context, const Stack& stack) : input(local_argument(context, stack, "input")) {
    const ShardingInput& whole = *input_named(context.call, "input");
    type = accumulation_type(input.scalar_type());
    count = whole.size(1) > 0 ? whole.whole.numel() / whole.size(1) : 0;
    for (std::int64_t dim = 0; dim < whole.ndim(); ++dim)
      if (dim != 1)
        for (const int axis : axes_of(context, "input", dim)) axes.push_back(axis);
  }

  at::Tensor by_channel(const at::Tensor& tensor) const {
    return tensor.to(type).transpose(0, 1).reshape({tensor.size(1), tensor.numel() > 0 ? -1 : 0});
  }
  // Converts a tensor (channels, everything else) back to the shape and dtype of `like`.
  at::Tensor restored(const at::Tensor& tensor, const at::Tensor& like) const {
    std::vector<std::int64_t> shape = like.sizes().vec();
    std::swap(shape[0], shape[1]);
    return tensor.reshape(shape)
        .transpose(0, 1)
        .contiguous(like.suggest_memory_format())
        .to(like.scalar_type());
  }
  // Over the row and over the ranks.
  at::Tensor total(const LocalContext& context, const at::Tensor& tensor) const {
    const at::Tensor sum = tensor.sum(1).contiguous();
    reduce_over(context.mesh, axes, sum, comm::ReduceOp::Sum);
    return sum;
  }
  at::Tensor column(const at::Tensor& tensor) const { return tensor.to(type).unsqueeze(1); }

  at::Tensor input;
  at::ScalarType type;
  std::int64_t count = 0;
  std::vector<int> axes;
};

// The results of the operator being replaced, which may have one more: what its own backward would save.
void local_batch_norm(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const ShardingCall& call = context.call;
  const auto number = [&](std::string_view name, std::string_view other) {
    return (*stack)[static_cast<std::size_t>(call.argument_index(call.has_argument(name) ? name : other))]
        .toDouble();
  };
  const double momentum = number("momentum", "exponential_average_factor"), eps = number("eps", "epsilon");
  const Channels channels(context, *stack);
  const at::Tensor weight = local_argument(context, *stack, "weight"),
                   bias = local_argument(context, *stack, "bias");
  const at::Tensor values = channels.by_channel(channels.input);
  const double count = static_cast<double>(channels.count);
  const at::Tensor mean = channels.total(context, values) / count;
  const at::Tensor centered = values - mean.unsqueeze(1);
  const at::Tensor squares = channels.total(context, centered.square());
  const at::Tensor inverse = (squares / count).add_(eps).rsqrt_();
  if (const at::Tensor running = local_argument(context, *stack, "running_mean"); running.defined())
    running.lerp_(mean.to(running.scalar_type()), momentum);
  if (const at::Tensor running = local_argument(context, *stack, "running_var"); running.defined())
    running.lerp_((squares / (count - 1)).to(running.scalar_type()), momentum);
  at::Tensor result = centered * inverse.unsqueeze(1);
  if (weight.defined()) result = result * channels.column(weight);
  if (bias.defined()) result = result + channels.column(bias);
  std::vector<at::Tensor> results{channels.restored(result, channels.input), mean.to(call.outputs[1].dtype),
                                  inverse.to(call.outputs[2].dtype)};
  for (std::size_t i = 3; i < call.outputs.size(); ++i)
    results.push_back(channels.input.new_empty(call.outputs[i].shape,
                                               channels.input.options().dtype(call.outputs[i].dtype)));
  store_results(context, stack, results);
}

void local_batch_norm_backward(const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
  const ShardingCall& call = context.call;
  const Channels channels(context, *stack);
  const at::Tensor gradient = channels.by_channel(
      local_argument(context, *stack, call.has_argument("grad_out") ? "grad_out" : "grad_output"));
  const at::Tensor mean = channels.column(local_argument(context, *stack, "save_mean"));
  const at::Tensor inverse = channels.column(
      local_argument(context, *stack, call.has_argument("save_invstd") ? "save_invstd" : "save_var"));
  const at::Tensor weight = local_argument(context, *stack, "weight");
  const at::Tensor normal = (channels.by_channel(channels.input) - mean) * inverse;
  const at::Tensor sum = channels.total(context, gradient),
                   product = channels.total(context, gradient * normal);
  const double count = static_cast<double>(channels.count);
  at::Tensor result =
      (gradient - (sum / count).unsqueeze(1) - normal * (product / count).unsqueeze(1)) * inverse;
  if (weight.defined()) result = result * channels.column(weight);
  const auto mask = output_mask(call);
  const auto place = output_positions(mask);
  std::vector<at::Tensor> results(3);
  if (mask[0]) results[0] = channels.restored(result, channels.input);
  if (mask[1]) results[1] = product.to(call.outputs[static_cast<std::size_t>(place[1])].dtype);
  if (mask[2]) results[2] = sum.to(call.outputs[static_cast<std::size_t>(place[2])].dtype);
  store_results(context, stack, results);
}

bool splits_anything(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return placement.splits(); });
}

StrategyBuilder channel_strategy(const ShardingCall& call) {
  StrategyBuilder strategy(call);
  for (const char* name : {"input", "grad_out", "grad_output"}) strategy.in(name, Shard{1});
  for (const char* name : {"weight", "bias", "running_mean", "running_var"}) strategy.in(name, Shard{0});
  // Empty outside of training: (0).
  for (const char* name : {"save_mean", "save_invstd", "save_var"})
    if (const ShardingInput* saved = input_named(call, name); saved && saved->whole.numel() > 0)
      strategy.in(name, Shard{0});
  return strategy;
}

// Output, mean, inverse deviation; some overloads also return what their backward saves.
Sharding batch_norm(const ShardingCall& call, bool training) {
  std::vector<AxisStrategy> strategies;
  StrategyBuilder channels = channel_strategy(call);
  channels.out(0, Shard{1});
  for (int i : {1, 2})
    if (training) channels.out(i, Shard{0});
  channels.add_to(strategies);
  for (std::int64_t dim = 0; dim < input_named(call, "input")->ndim(); ++dim)
    if (dim != 1) StrategyBuilder(call).in("input", Shard{dim}).out(0, Shard{dim}).add_to(strategies);
  Sharding sharding = choose(training ? with_written_statistics(call) : call, std::move(strategies));
  if (!training)
    skip_where_empty(call, sharding, {"input"}, std::vector<bool>(call.outputs.size(), true));
  else if (splits_anything(sharding.inputs[0]))
    sharding.local = local_batch_norm;
  return sharding;
}

Sharding batch_norm_backward(const ShardingCall& call, bool training) {
  const auto mask = output_mask(call);
  const auto place = output_positions(mask);
  std::vector<AxisStrategy> strategies;
  channel_strategy(call)
      .out(place[0], Shard{1})
      .out(place[1], Shard{0})
      .out(place[2], Shard{0})
      .add_to(strategies);
  // In training, the gradient of the input needs the sums over all ranks, so the gradients of the parameters
  // are whole.
  const Placement parameters = training ? Placement() : Placement(Partial{});
  const ShardingInput& input = *input_named(call, "input");
  for (std::int64_t dim = 0; dim < input.ndim(); ++dim) {
    if (dim == 1) continue;
    StrategyBuilder strategy(call);
    for (const char* name : {"input", "grad_out", "grad_output"}) strategy.in(name, Shard{dim});
    strategy.out(place[0], Shard{dim}).out(place[1], parameters).out(place[2], parameters).add_to(strategies);
  }
  Sharding sharding = choose(call, std::move(strategies));
  if (!training)
    skip_where_empty(call, sharding, {"input"}, mask);
  else if (splits_anything(
               sharding.inputs[static_cast<std::size_t>(call.index_at(call.argument_index("input")))]))
    sharding.local = local_batch_norm_backward;
  return sharding;
}

bool trains(const ShardingCall& call) {
  for (const char* name : {"training", "train", "update"})
    if (call.has_argument(name)) return call.argument(name).toBool();
  return true;
}

}  // namespace

void add_normalization_rules(RuleTable& table) {
  table.add({"native_layer_norm", "_fused_rms_norm"}, rows);
  table.add({"native_layer_norm_backward", "_fused_rms_norm_backward"}, rows_backward);
  table.add({"native_group_norm"}, [](const ShardingCall& call) { return group_norm(call, false); });
  table.add({"native_group_norm_backward"}, [](const ShardingCall& call) { return group_norm(call, true); });
  table.add({"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"},
            [](const ShardingCall& call) { return batch_norm(call, trains(call)); });
  table.add({"native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward"},
            [](const ShardingCall& call) { return batch_norm_backward(call, trains(call)); });
}

}  // namespace penstock::detail
