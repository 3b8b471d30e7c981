// Convolutions, pooling and resampling: images are independent, and so are channels, unless a convolution
// mixes them. Height and width are never split.
#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/strategy_builder.h"

namespace penstock::detail {
namespace {

// ---- convolutions: input (batch, channels, ...), weight (out channels, channels of a group, ...), the
// reverse if transposed ----

struct ConvolutionDims {
  explicit ConvolutionDims(const ShardingCall& call) : groups(call.argument("groups").toInt()) {
    if (call.argument("transposed").toBool()) std::swap(weight_out, weight_in);
  }
  std::int64_t groups;
  std::int64_t weight_out = 0, weight_in = 1;
};

Sharding choose_convolution(const ShardingCall& call,
                            const std::function<std::vector<AxisStrategy>(bool channels)>& strategies,
                            std::int64_t& parts) {
  const ConvolutionDims dims(call);
  Sharding sharding = choose(call, strategies(true));
  parts = 1;
  if (dims.groups == 1) return sharding;
  // Whole groups on every rank.
  parts = plain_parts(call, sharding, "input", 1);
  if (dims.groups % parts != 0) {
    parts = 1;
    sharding = choose(call, strategies(false));
  }
  return sharding;
}

Sharding convolution(const ShardingCall& call) {
  const ConvolutionDims dims(call);
  const auto strategies = [&](bool channels) {
    std::vector<AxisStrategy> all;
    StrategyBuilder(call).in("input", Shard{0}).out(0, Shard{0}).add_to(all);
    if (dims.groups == 1) {
      StrategyBuilder(call)
          .in("weight", Shard{dims.weight_out})
          .in("bias", Shard{0})
          .out(0, Shard{1})
          .add_to(all);
      StrategyBuilder(call)
          .in("input", Shard{1})
          .in("weight", Shard{dims.weight_in})
          .out(0, Partial{})
          .add_to(all);
    } else if (channels) {
      StrategyBuilder(call)
          .in("input", Shard{1})
          .in("weight", Shard{0})
          .in("bias", Shard{0})
          .out(0, Shard{1})
          .add_to(all);
    }
    return all;
  };
  std::int64_t parts = 1;
  Sharding sharding = choose_convolution(call, strategies, parts);
  if (parts > 1) sharding.arguments.push_back({call.argument_index("groups"), dims.groups / parts});
  // Of partial results, only the first one along the axis includes the bias.
  for (std::size_t axis = 0; axis < call.axes(); ++axis)
    if (sharding.outputs[0][axis].is_partial() && call.coordinate[axis] != 0) {
      sharding.arguments.push_back({call.argument_index("bias"), c10::IValue()});
      break;
    }
  skip_where_empty(call, sharding, {"input", "weight"}, {true});
  return sharding;
}

Sharding convolution_backward(const ShardingCall& call) {
  const ConvolutionDims dims(call);
  std::vector<bool> mask;
  for (const c10::IValue& asked : call.argument("output_mask").toListRef()) mask.push_back(asked.toBool());
  const auto place = output_positions(mask);
  const auto strategies = [&](bool channels) {
    std::vector<AxisStrategy> all;
    const auto add = [&](const Placement& gradient, const Placement& input, const Placement& weight,
                         const Placement& to_input, const Placement& to_weight, const Placement& to_bias) {
      StrategyBuilder(call)
          .in("grad_output", gradient)
          .in("input", input)
          .in("weight", weight)
          .out(place[0], to_input)
          .out(place[1], to_weight)
          .out(place[2], to_bias)
          .add_to(all);
    };
    add(Shard{0}, Shard{0}, Replicate{}, Shard{0}, Partial{}, Partial{});
    if (dims.groups == 1) {
      add(Shard{1}, Replicate{}, Shard{dims.weight_out}, Partial{}, Shard{dims.weight_out}, Shard{0});
      add(Replicate{}, Shard{1}, Shard{dims.weight_in}, Shard{1}, Shard{dims.weight_in}, Replicate{});
    } else if (channels) {
      add(Shard{1}, Shard{1}, Shard{0}, Shard{1}, Shard{0}, Shard{0});
    }
    return all;
  };
  std::int64_t parts = 1;
  Sharding sharding = choose_convolution(call, strategies, parts);
  if (parts > 1) sharding.arguments.push_back({call.argument_index("groups"), dims.groups / parts});
  if (!call.argument("bias_sizes").isNone() && call.argument("bias_sizes").toListRef().size() == 1) {
    const auto gradient =
        local_shape(call, input_named(call, "grad_output")->whole.shape, sharding.inputs[0]);
    sharding.arguments.push_back(
        {call.argument_index("bias_sizes"), c10::IValue(std::vector<std::int64_t>{gradient[1]})});
  }
  skip_where_empty(call, sharding, {"grad_output", "input", "weight"}, mask);
  if (sharding.local && mask[2]) {
    // A rank without channels of the input still has those of the gradient.
    sharding.local = [zeros = std::move(sharding.local)](const LocalContext& context,
                                                         const c10::OperatorHandle& op, Stack* stack) {
      const at::Tensor gradient = local_argument(context, *stack, "grad_output");
      std::vector<std::int64_t> dims{0};
      for (std::int64_t dim = 2; dim < gradient.dim(); ++dim) dims.push_back(dim);
      zeros(context, op, stack);
      stack->back() = gradient.sum(dims);
    };
  }
  return sharding;
}

// ---- by image and channel ----

// The last `spatial` dims are whole; all tensors have the dims before them.
Sharding spatial(const ShardingCall& call, std::int64_t spatial_dims) {
  const std::int64_t ndim = call.inputs[0].ndim();
  std::vector<AxisStrategy> strategies;
  for (std::int64_t dim = 0; dim < ndim - spatial_dims; ++dim) {
    AxisStrategy strategy = replicated_strategy(call);
    for (Placement& placement : strategy.inputs) placement = Shard{dim};
    for (Placement& placement : strategy.outputs) placement = Shard{dim};
    strategies.push_back(std::move(strategy));
  }
  Sharding sharding = choose(call, std::move(strategies));
  // Backward operators of resampling take the size of the result as an argument.
  if (call.has_argument("input_size"))
    sharding.arguments.push_back(
        {call.argument_index("input_size"),
         c10::IValue(local_shape(call, call.outputs[0].shape, sharding.outputs[0]))});
  skip_where_empty(call, sharding, {call.op.schema().arguments()[0].name()},
                   std::vector<bool>(call.outputs.size(), true));
  return sharding;
}

ShardingRule by_channel(std::int64_t spatial_dims) {
  return [spatial_dims](const ShardingCall& call) { return spatial(call, spatial_dims); };
}

}  // namespace

void add_convolution_rules(RuleTable& table) {
  table.add({"convolution"}, convolution);
  table.add({"convolution_backward"}, convolution_backward);
  table.add({"_adaptive_avg_pool1d", "adaptive_max_pool1d", "max_pool1d_with_indices", "upsample_nearest1d",
             "upsample_nearest1d_backward", "_upsample_nearest_exact1d", "_upsample_nearest_exact1d_backward",
             "upsample_linear1d", "upsample_linear1d_backward", "reflection_pad1d",
             "reflection_pad1d_backward", "replication_pad1d", "replication_pad1d_backward"},
            by_channel(1));
  table.add({"max_pool2d_with_indices",
             "max_pool2d_with_indices_backward",
             "avg_pool2d",
             "avg_pool2d_backward",
             "_adaptive_avg_pool2d",
             "_adaptive_avg_pool2d_backward",
             "adaptive_max_pool2d",
             "adaptive_max_pool2d_backward",
             "upsample_nearest2d",
             "upsample_nearest2d_backward",
             "_upsample_nearest_exact2d",
             "_upsample_nearest_exact2d_backward",
             "upsample_bilinear2d",
             "upsample_bilinear2d_backward",
             "upsample_bicubic2d",
             "upsample_bicubic2d_backward",
             "_upsample_bilinear2d_aa",
             "_upsample_bilinear2d_aa_backward",
             "_upsample_bicubic2d_aa",
             "_upsample_bicubic2d_aa_backward",
             "reflection_pad2d",
             "reflection_pad2d_backward",
             "replication_pad2d",
             "replication_pad2d_backward"},
            by_channel(2));
  table.add({"max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d",
             "avg_pool3d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
             "adaptive_max_pool3d", "adaptive_max_pool3d_backward", "upsample_nearest3d",
             "upsample_nearest3d_backward", "_upsample_nearest_exact3d", "_upsample_nearest_exact3d_backward",
             "upsample_trilinear3d", "upsample_trilinear3d_backward", "reflection_pad3d",
             "reflection_pad3d_backward", "replication_pad3d", "replication_pad3d_backward",
             // Channels become pixels, or the reverse.
             "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"},
            by_channel(3));
}

}  // namespace penstock::detail
