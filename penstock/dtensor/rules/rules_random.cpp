// Random operators: each rank draws the values of its own part of the whole tensor.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <numbers>
#include <optional>

#include "penstock/base/describe.h"
#include "penstock/dtensor/tensor/dtensor_random.h"
#include "penstock/dtensor/tensor/rule_helpers.h"
#include "penstock/dtensor/tensor/rule_registry.h"
#include "penstock/dtensor/tensor/spec.h"
#include "penstock/errors.h"
#include "penstock/mesh/local_shard.h"

namespace penstock::detail {
namespace {

void refuse_generator(const ShardingCall& call) {
  if (call.has_argument("generator") && !call.argument("generator").isNone())
    throw ValueError(describe(fmt::format("{}: generator", call.traits.name), "a Generator",
                              "none: its numbers would depend on how the tensor is split",
                              "seed random operators of a mesh with manual_seed(mesh, seed) of "
                              "penstock/dtensor/tensor/dtensor_random.h"));
}

// A number of the current call; the decision may have been made for another one.
double number(const LocalContext& context, const Stack& arguments, const char* name) {
  return arguments[static_cast<std::size_t>(context.call.argument_index(name))].toScalar().toDouble();
}

// Draws for output 0 of a call.
class Draws {
 public:
  explicit Draws(const LocalContext& context)
      : shape_(context.call.outputs[0].shape),
        boxes_(local_boxes(shape_, context.call.mesh_shape, context.call.coordinate, context.outputs[0])) {}

  // Every part of `local`, with its position in the whole tensor.
  template <class Fill>
  void fill(const at::Tensor& local, Fill&& fill) const {
    for (const ShardBox& box : boxes_) {
      at::Tensor part = local;
      for (std::size_t dim = 0; dim < shape_.size(); ++dim)
        part = part.narrow(static_cast<std::int64_t>(dim), box.local_offset[dim], box.shape[dim]);
      fill(part, GlobalBox{shape_, box.offset});
    }
  }

  void uniform(const at::Tensor& local, const RandomKey& key, double low, double high) const {
    fill(local, [&](const at::Tensor& part, const GlobalBox& box) {
      keyed_uniform_(part, key, low, high, box, precision_of(local));
    });
  }
  void normal(const at::Tensor& local, const RandomKey& key, double mean, double deviation) const {
    fill(local, [&](const at::Tensor& part, const GlobalBox& box) {
      keyed_normal_(part, key, mean, deviation, box, precision_of(local));
    });
  }
  void bernoulli(const at::Tensor& local, const RandomKey& key, double p) const {
    fill(local, [&](const at::Tensor& part, const GlobalBox& box) { keyed_bernoulli_(part, key, p, box); });
  }
  // In [0, 1), for further computation: in float32 for dtypes that have no more digits.
  at::Tensor unit(const at::Tensor& local, at::ScalarType dtype, const RandomKey& key) const {
    const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
    at::Tensor values = at::empty(local.sizes(), local.options().dtype(narrow ? at::kFloat : at::kDouble));
    uniform(values, key, 0, 1);
    return values;
  }

 private:
  static Precision precision_of(const at::Tensor& local) {
    return local.scalar_type() == at::kDouble ? Precision::Double : Precision::Single;
  }

  const std::vector<std::int64_t>& shape_;
  std::vector<ShardBox> boxes_;
};

// Fills the local part of the result. The arguments are the local ones.
using Filler = void (*)(const LocalContext&, const Draws&, const at::Tensor& local, const RandomKey&,
                        const Stack& arguments);

// The result is output 0: the first tensor itself if it is written, otherwise a new tensor like it.
LocalCall filling_with(Filler filler) {
  return [filler](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    const at::Tensor self = (*stack)[static_cast<std::size_t>(context.call.inputs[0].argument)].toTensor();
    const GlobalGeometry& whole = context.call.outputs[0];
    const bool in_place = context.call.inputs[0].written;
    const std::vector<std::int64_t> shape = local_shape(context.call, whole.shape, context.outputs[0]);
    at::Tensor local = in_place ? self
                                : at::empty_strided(shape, dense_stride(shape, whole.stride),
                                                    self.options().dtype(whole.dtype));
    // Also on ranks that hold nothing: the operator counters must be equal on all ranks.
    const RandomKey key = next_random_key(context.mesh, self, purpose::kNoise);
    filler(context, Draws(context), local, key, *stack);
    stack->clear();
    stack->push_back(std::move(local));
  };
}

// The values of the arguments are either not used or used elementwise.
ShardingRule drawing(Filler filler, bool model_only) {
  return [filler, model_only](const ShardingCall& call) {
    refuse_generator(call);
    Sharding sharding = model_only && !call.inputs[0].written ? placed_like_first_input(call)
                                                              : choose(call, elementwise_strategies(call));
    sharding.local = filling_with(filler);
    return sharding;
  };
}

// ---- fillers ----

void uniform(const LocalContext& context, const Draws& draws, const at::Tensor& local, const RandomKey& key,
             const Stack& arguments) {
  draws.uniform(local, key, number(context, arguments, "from"), number(context, arguments, "to"));
}
void unit_uniform(const LocalContext&, const Draws& draws, const at::Tensor& local, const RandomKey& key,
                  const Stack&) {
  draws.uniform(local, key, 0, 1);
}

void normal(const LocalContext& context, const Draws& draws, const at::Tensor& local, const RandomKey& key,
            const Stack& arguments) {
  draws.normal(local, key, number(context, arguments, "mean"), number(context, arguments, "std"));
}
void unit_normal(const LocalContext&, const Draws& draws, const at::Tensor& local, const RandomKey& key,
                 const Stack&) {
  draws.normal(local, key, 0, 1);
}

// Means and deviations given as tensors.
void normal_around(const LocalContext& context, const Draws& draws, const at::Tensor& local,
                   const RandomKey& key, const Stack& arguments) {
  draws.normal(local, key, 0, 1);
  const auto argument = [&](const char* name) {
    return arguments[static_cast<std::size_t>(context.call.argument_index(name))];
  };
  const c10::IValue mean = argument("mean"), deviation = argument("std");
  deviation.isTensor() ? local.mul_(deviation.toTensor()) : local.mul_(deviation.toScalar());
  mean.isTensor() ? local.add_(mean.toTensor()) : local.add_(mean.toScalar());
}

void log_normal(const LocalContext& context, const Draws& draws, const at::Tensor& local,
                const RandomKey& key, const Stack& arguments) {
  at::Tensor values = at::empty(
      local.sizes(), local.options().dtype(local.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  draws.normal(values, key, number(context, arguments, "mean"), number(context, arguments, "std"));
  local.copy_(values.exp_());
}

void exponential(const LocalContext& context, const Draws& draws, const at::Tensor& local,
                 const RandomKey& key, const Stack& arguments) {
  const double rate = number(context, arguments, "lambd");
  if (!(rate > 0))
    throw ValueError(describe("exponential_: lambd", fmt::format("{}", rate), "a number above 0"));
  local.copy_(draws.unit(local, local.scalar_type(), key).neg_().log1p_().div_(-rate));
}

void cauchy(const LocalContext& context, const Draws& draws, const at::Tensor& local, const RandomKey& key,
            const Stack& arguments) {
  const double median = number(context, arguments, "median"), sigma = number(context, arguments, "sigma");
  local.copy_(draws.unit(local, local.scalar_type(), key)
                  .sub_(0.5)
                  .mul_(std::numbers::pi)
                  .tan_()
                  .mul_(sigma)
                  .add_(median));
}

// The number of trials until one succeeds.
void geometric(const LocalContext& context, const Draws& draws, const at::Tensor& local, const RandomKey& key,
               const Stack& arguments) {
  const double p = number(context, arguments, "p");
  if (!(p > 0 && p < 1))
    throw ValueError(describe("geometric_: p", fmt::format("{}", p), "a probability above 0 and below 1"));
  local.copy_(
      draws.unit(local, local.scalar_type(), key).neg_().log1p_().div_(std::log1p(-p)).floor_().add_(1));
}

void bernoulli_number(const LocalContext& context, const Draws& draws, const at::Tensor& local,
                      const RandomKey& key, const Stack& arguments) {
  const double p = number(context, arguments, "p");
  const bool direct = c10::isFloatingType(local.scalar_type()) || local.scalar_type() == at::kBool;
  const at::Tensor values = direct ? local : at::empty(local.sizes(), local.options().dtype(at::kBool));
  draws.bernoulli(values, key, p);
  if (!direct) local.copy_(values);
}

void bernoulli_tensor(const LocalContext& context, const Draws& draws, const at::Tensor& local,
                      const RandomKey& key, const Stack& arguments) {
  const at::Tensor p = arguments[static_cast<std::size_t>(
                                     context.call.has_argument("p") ? context.call.argument_index("p") : 0)]
                           .toTensor();
  local.copy_(draws.unit(local, p.scalar_type(), key).lt(p));
}

// Integers in [low, low + count).
void integers(const Draws& draws, const at::Tensor& local, const RandomKey& key, std::int64_t low,
              std::uint64_t count) {
  const at::TensorOptions wide = local.options().dtype(at::kDouble);
  at::Tensor values = at::empty(local.sizes(), wide);
  draws.uniform(values, key, 0, 1);
  if (count <= (std::uint64_t{1} << 53)) {
    values = values.mul_(static_cast<double>(count)).floor_();
    if (c10::isFloatingType(local.scalar_type()))
      local.copy_(values.add_(static_cast<double>(low)));
    else
      local.copy_(values.to(at::kLong).add_(low));
    return;
  }
  // Two draws of 31 and 32 bits.
  RandomKey second = key;
  second.purpose = purpose::kGeneral;
  at::Tensor lower = at::empty(local.sizes(), wide);
  draws.uniform(lower, second, 0, 1);
  const at::Tensor high = values.mul_(2147483648.0).floor_().to(at::kLong),
                   low_bits = lower.mul_(4294967296.0).floor_().to(at::kLong);
  at::Tensor all = high.mul_(std::int64_t{1} << 32).add_(low_bits);
  if (count < (std::uint64_t{1} << 63)) all = all.remainder_(static_cast<std::int64_t>(count));
  local.copy_(all.add_(low));
}

// The largest integer up to which a dtype represents all integers, the range of random_() without bounds.
std::uint64_t integers_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return (std::uint64_t{1} << 53) + 1;
    case at::kFloat:
      return (std::uint64_t{1} << 24) + 1;
    case at::kHalf:
      return (std::uint64_t{1} << 11) + 1;
    case at::kBFloat16:
      return (std::uint64_t{1} << 8) + 1;
    case at::kBool:
      return 2;
    case at::kByte:
      return 256;
    default:
      return std::uint64_t{1} << (8 * c10::elementSize(dtype) - 1);
  }
}

void random_integers(const LocalContext& context, const Draws& draws, const at::Tensor& local,
                     const RandomKey& key, const Stack& arguments) {
  const auto bound = [&](const char* name) -> std::optional<std::int64_t> {
    if (!context.call.has_argument(name)) return std::nullopt;
    const c10::IValue& value = arguments[static_cast<std::size_t>(context.call.argument_index(name))];
    return value.isNone() ? std::nullopt : std::optional(value.toInt());
  };
  std::optional<std::int64_t> low = bound("from"), high = bound("to");
  if (!low) low = bound("low");
  if (!high) high = bound("high");
  const std::int64_t first = low.value_or(0);
  // Without an upper bound: up to the largest value of the dtype.
  const std::uint64_t count = high ? static_cast<std::uint64_t>(*high) - static_cast<std::uint64_t>(first)
                                   : integers_of(local.scalar_type()) - static_cast<std::uint64_t>(first);
  if (high && *high <= first)
    throw ValueError(describe(fmt::format("{}: bounds", context.call.traits.name),
                              fmt::format("from {} to {}", first, *high),
                              "an upper bound above the lower one"));
  integers(draws, local, key, first, count);
}

// ---- dropout and the like ----

Sharding native_dropout(const ShardingCall& call) {
  auto strategies = elementwise_strategies(call);
  // The mask is the same for every partial value.
  for (const PartialOp kind : partial_kinds(call))
    if (kind == PartialOp::Sum || kind == PartialOp::Avg)
      strategies.push_back({{Partial{kind}}, {Partial{kind}, Replicate{}}});
  Sharding sharding = choose(call, std::move(strategies));
  sharding.local = [](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    const at::Tensor input = (*stack)[0].toTensor();
    const double p = number(context, *stack, "p");
    const c10::IValue train = (*stack)[static_cast<std::size_t>(context.call.argument_index("train"))];
    if (!(p >= 0 && p <= 1))
      throw ValueError(describe("native_dropout: p", fmt::format("{}", p), "a probability from 0 to 1"));
    at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
    at::Tensor result;
    if (train.isBool() && !train.toBool()) {
      mask.fill_(true);
      result = input.clone();
    } else {
      const RandomKey key = next_random_key(context.mesh, input, purpose::kDropout);
      Draws(context).bernoulli(mask, key, 1 - p);
      result = p == 1 ? at::zeros_like(input) : input.mul(mask).mul_(1 / (1 - p));
    }
    stack->clear();
    stack->push_back(std::move(result));
    stack->push_back(std::move(mask));
  };
  return sharding;
}

// The noise is written, whether the schema declares it or not.
Sharding rrelu(const ShardingCall& call) {
  refuse_generator(call);
  ShardingCall writing = call;
  const int noise = call.index_at(call.argument_index("noise"));
  writing.inputs[static_cast<std::size_t>(noise)].written = true;
  Sharding sharding = choose(writing, elementwise_strategies(call));
  if (!call.argument("training").toBool()) return sharding;
  sharding.local = [](const LocalContext& context, const c10::OperatorHandle&, Stack* stack) {
    const at::Tensor self = (*stack)[0].toTensor(), noise = (*stack)[1].toTensor();
    const double lower = number(context, *stack, "lower"), upper = number(context, *stack, "upper");
    Draws(context).uniform(noise, next_random_key(context.mesh, self, purpose::kNoise), lower, upper);
    noise.masked_fill_(self.gt(0), 1);
    at::Tensor result = context.call.inputs[0].written ? self.mul_(noise) : self.mul(noise);
    stack->clear();
    stack->push_back(std::move(result));
  };
  return sharding;
}

}  // namespace

void add_random_rules(RuleTable& table) {
  table.add({"uniform"}, drawing(uniform, true));
  table.add({"normal_", "normal_functional"}, drawing(normal, true));
  table.add({"normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"},
            drawing(normal_around, false));
  table.add({"log_normal"}, drawing(log_normal, true));
  table.add({"exponential"}, drawing(exponential, true));
  table.add({"cauchy"}, drawing(cauchy, true));
  table.add({"geometric"}, drawing(geometric, true));
  table.add({"bernoulli.p", "bernoulli_.float"}, drawing(bernoulli_number, true));
  table.add({"bernoulli", "bernoulli.Tensor", "bernoulli_.Tensor"}, drawing(bernoulli_tensor, false));
  table.add({"rand_like"}, drawing(unit_uniform, true));
  table.add({"randn_like"}, drawing(unit_normal, true));
  table.add({"random", "randint_like"}, drawing(random_integers, true));
  table.add({"native_dropout"}, native_dropout);
  table.add({"rrelu_with_noise"}, rrelu);
}

}  // namespace penstock::detail
