// Elementwise operators: every dim may be split, together with all inputs that are not broadcast along it.
#include <ATen/ATen.h>

#include <algorithm>

#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock::detail {
namespace {

Sharding elementwise(const ShardingCall& call) { return choose(call, elementwise_strategies(call)); }

// All tensors with dims are partial: the same holds for sums and means, and every input contributes its part.
void add_all_partial(const ShardingCall& call, std::vector<AxisStrategy>& strategies, PartialOp kind) {
  AxisStrategy strategy = replicated_strategy(call);
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    if (call.inputs[i].plain) return;
    strategy.inputs[i] = Partial{kind};
  }
  for (Placement& placement : strategy.outputs) placement = Partial{kind};
  strategies.push_back(std::move(strategy));
}

// a + b, a - b: both sides partial of the same kind. A scalar on one side would be added once per rank, which
// is valid for a mean only.
Sharding additive(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  const bool numbers = std::any_of(call.inputs.begin(), call.inputs.end(),
                                   [](const ShardingInput& input) { return input.plain; }) ||
                       (call.inputs.size() == 1 && call.traits.name.find("Scalar") != std::string::npos);
  for (const PartialOp kind : partial_kinds(call))
    if (sums(kind) && !numbers) add_all_partial(call, strategies, kind);
  return choose(call, std::move(strategies));
}

// a * b, a / b: linear in the first, and for products in the second, if the other side is whole.
Sharding scaling(const ShardingCall& call, bool second_too) {
  auto strategies = elementwise_strategies(call);
  for (const PartialOp kind : partial_kinds(call)) {
    if (!sums(kind)) continue;
    for (std::size_t term = 0; term < (second_too ? call.inputs.size() : 1); ++term) {
      if (call.inputs[term].plain) continue;
      AxisStrategy strategy = replicated_strategy(call);
      strategy.inputs[term] = Partial{kind};
      for (Placement& placement : strategy.outputs) placement = Partial{kind};
      strategies.push_back(std::move(strategy));
    }
  }
  return choose(call, std::move(strategies));
}

// One input, linear: partial values stay partial.
Sharding linear_unary(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  for (const PartialOp kind : partial_kinds(call))
    if (sums(kind)) add_all_partial(call, strategies, kind);
  return choose(call, std::move(strategies));
}

// The wrapper does not carry the lazy conjugation bit, so its parts must not either: they are copied.
Sharding conjugate(const ShardingCall& call) {
  Sharding sharding = linear_unary(call);
  sharding.local = [](const LocalContext&, const c10::OperatorHandle&, Stack* stack) {
    stack->back() = at::conj_physical(stack->back().toTensor());
  };
  return sharding;
}

// The same values in other memory: any kind of partial value, unless the dtype changes to one that rounds
// them.
Sharding copying(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  const auto exact = [&](at::ScalarType from) {
    const at::ScalarType to = call.outputs[0].dtype;
    return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
  };
  const bool linear = std::all_of(call.inputs.begin(), call.inputs.end(),
                                  [&](const ShardingInput& input) { return exact(input.whole.dtype); });
  for (const PartialOp kind : partial_kinds(call))
    if (linear) add_all_partial(call, strategies, kind);
  return choose(call, std::move(strategies));
}

// Overwrites everything with one value. A partial result is correct for zero, and for reductions that return
// equal values unchanged.
Sharding filling(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  const bool zero = call.traits.name.find("zero") != std::string::npos;
  for (const PartialOp kind : partial_kinds(call))
    if (zero || kind == PartialOp::Avg || kind == PartialOp::Min || kind == PartialOp::Max)
      add_all_partial(call, strategies, kind);
  return choose(call, std::move(strategies));
}

// Of a partial sum, the first rank along the axis fills in the value and the others zero, so it counts once.
Sharding masked_fill(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  for (const PartialOp kind : partial_kinds(call)) {
    if (!sums(kind)) continue;
    AxisStrategy strategy = replicated_strategy(call);
    strategy.inputs[0] = Partial{kind};
    strategy.outputs[0] = Partial{kind};
    strategies.push_back(std::move(strategy));
  }
  Sharding sharding = choose(call, std::move(strategies));
  bool fills = true;
  for (std::size_t axis = 0; axis < call.axes(); ++axis)
    if (sharding.inputs[0][axis].is_partial(PartialOp::Sum) && call.coordinate[axis] != 0) fills = false;
  if (fills) return sharding;
  sharding.local = [](const LocalContext& context, const c10::OperatorHandle& op, Stack* stack) {
    c10::IValue& value = (*stack)[static_cast<std::size_t>(context.call.argument_index("value"))];
    value = value.isTensor() ? c10::IValue(at::zeros_like(value.toTensor())) : c10::IValue(at::Scalar(0));
    op.callBoxed(stack);
  };
  return sharding;
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  table.add({"abs",
             "absolute",
             "acos",
             "acosh",
             "angle",
             "asin",
             "asinh",
             "atan",
             "atanh",
             "atan2",
             "bitwise_and",
             "bitwise_not",
             "bitwise_or",
             "bitwise_xor",
             "bitwise_left_shift",
             "bitwise_right_shift",
             "__and__",
             "__or__",
             "__xor__",
             "__lshift__",
             "__rshift__",
             "ceil",
             "clamp",
             "clamp_max",
             "clamp_min",
             "clip",
             "copysign",
             "cos",
             "cosh",
             "digamma",
             "elu",
             "elu_backward",
             "celu",
             "eq",
             "erf",
             "erfc",
             "erfinv",
             "exp",
             "exp2",
             "expm1",
             "float_power",
             "floor",
             "floor_divide",
             "fmax",
             "fmin",
             "fmod",
             "frac",
             "gcd",
             "ge",
             "gelu",
             "gelu_backward",
             "gt",
             "hardshrink",
             "hardshrink_backward",
             "hardsigmoid",
             "hardsigmoid_backward",
             "hardswish",
             "hardswish_backward",
             "hardtanh",
             "hardtanh_backward",
             "heaviside",
             "hypot",
             "isfinite",
             "isinf",
             "isnan",
             "isneginf",
             "isposinf",
             "le",
             "leaky_relu",
             "leaky_relu_backward",
             "lerp",
             "lgamma",
             "log",
             "log10",
             "log1p",
             "log2",
             "logaddexp",
             "logaddexp2",
             "logical_and",
             "logical_not",
             "logical_or",
             "logical_xor",
             "logit",
             "logit_backward",
             "log_sigmoid_forward",
             "log_sigmoid_backward",
             "lt",
             "maximum",
             "minimum",
             "mish",
             "mish_backward",
             "nan_to_num",
             "ne",
             "nextafter",
             "pow",
             "polygamma",
             "reciprocal",
             "relu",
             "relu6",
             "remainder",
             "round",
             "rsqrt",
             "selu",
             "sgn",
             "sigmoid",
             "sigmoid_backward",
             "sign",
             "signbit",
             "silu",
             "silu_backward",
             "sin",
             "sinc",
             "sinh",
             "softplus",
             "softplus_backward",
             "softshrink",
             "softshrink_backward",
             "sqrt",
             "square",
             "tan",
             "tanh",
             "tanh_backward",
             "threshold",
             "threshold_backward",
             "trunc",
             "where.self",
             "where.ScalarSelf",
             "where.ScalarOther",
             "where.Scalar",
             "xlogy",
             "addcdiv",
             "addcmul",
             "_prelu_kernel",
             "_prelu_kernel_backward",
             "rrelu_with_noise_backward",
             "special_erfcx",
             "special_expit",
             "special_log1p",
             "special_entr",
             "native_dropout_backward",
             "_masked_scale"},
            elementwise);
  table.add({"add", "sub", "rsub"}, additive);
  table.add({"mul"}, [](const ShardingCall& call) { return scaling(call, true); });
  table.add({"div", "true_divide"}, [](const ShardingCall& call) {
    // A rounding mode makes it non-linear.
    const bool rounds = call.has_argument("rounding_mode") && !call.argument("rounding_mode").isNone();
    return rounds ? elementwise(call) : scaling(call, false);
  });
  table.add({"masked_fill"}, masked_fill);
  table.add({"neg", "negative"}, linear_unary);
  table.add({"_conj"}, conjugate);
  table.add({"positive", "clone", "detach", "alias", "lift", "lift_fresh", "lift_fresh_copy", "alias_copy",
             "detach_copy", "_to_copy", "copy_", "copy", "contiguous", "_conj_physical", "resolve_conj"},
            copying);
  table.add({"fill_", "fill", "zero_", "zero"}, filling);
}

}  // namespace penstock::detail
