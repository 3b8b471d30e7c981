#include "penstock/graph/ir/state_operator.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/torch/random/generator_state.h"

namespace penstock::graph {
namespace {

using torch::jit::pop;

constexpr std::string_view kRandom = "penstock_random", kEffect = "penstock_effect";
// Between the namespace and the name of the operator inside: "aten__bernoulli".
constexpr std::string_view kSeparator = "__";

std::string_view namespace_of(StateKind kind) { return kind == StateKind::Generator ? kRandom : kEffect; }

std::string name_with_state(const std::string& name, StateKind kind) {
  const std::size_t colons = name.find("::");
  PENSTOCK_INVARIANT(colons != std::string::npos, "an operator has no namespace");
  return fmt::format("{}::{}{}{}", namespace_of(kind), name.substr(0, colons), kSeparator,
                     name.substr(colons + 2));
}

class StateOperators {
 public:
  static StateOperators& instance() {
    // Never freed: graphs may live longer than static objects.
    static StateOperators& all = *new StateOperators;
    return all;
  }

  c10::OperatorHandle with_state(const c10::OperatorHandle& op, StateKind kind) {
    const std::string name = name_with_state(op.operator_name().name, kind);
    const c10::OperatorName full(name, op.operator_name().overload_name);
    const std::lock_guard lock(mutex_);
    if (const auto known = c10::Dispatcher::singleton().findSchema(full)) return *known;
    define(op, kind, full);
    const auto made = c10::Dispatcher::singleton().findSchema(full);
    PENSTOCK_INVARIANT(made.has_value(), "an operator that was just registered is not found");
    inside_.emplace(operator_index(*made), OperatorInside{op, kind});
    return *made;
  }

  std::optional<OperatorInside> inside(const c10::OperatorHandle& op) const {
    const std::string& name = op.operator_name().name;
    if (!name.starts_with("penstock_")) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto found = inside_.find(operator_index(op));
    if (found == inside_.end()) return std::nullopt;
    return found->second;
  }

 private:
  StateOperators()
      : random_(torch::Library::FRAGMENT, std::string(kRandom), c10::nullopt, __FILE__, __LINE__),
        effects_(torch::Library::FRAGMENT, std::string(kEffect), c10::nullopt, __FILE__, __LINE__) {}

  void define(const c10::OperatorHandle& op, StateKind kind, const c10::OperatorName& full);

  mutable std::mutex mutex_;
  torch::Library random_, effects_;
  std::unordered_map<std::size_t, OperatorInside> inside_;  // by operator_index()
};

OperatorInside must_be_inside(const c10::OperatorHandle& op) {
  const auto inside = StateOperators::instance().inside(op);
  PENSTOCK_INVARIANT(inside.has_value(), "an operator with a state is not registered");
  return *inside;
}

// A generator that the operator takes itself, or the default one of the device.
at::Generator generator_among(const torch::jit::Stack& stack, std::size_t arguments, at::Device device) {
  for (std::size_t i = stack.size() - arguments; i < stack.size(); ++i)
    if (stack[i].isGenerator()) return stack[i].toGenerator();
  return default_generator(device);
}

void call_with_generator_state(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OperatorInside inside = must_be_inside(op);
  const at::Device device = pop(*stack).toDevice();
  const at::Tensor state = pop(*stack).toTensor();
  const GeneratorStateScope scope(generator_among(*stack, inside.op.schema().arguments().size(), device),
                                  state);
  inside.op.callBoxed(stack);
  stack->emplace_back(scope.state());
}

void call_with_token(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OperatorInside inside = must_be_inside(op);
  at::Tensor token = pop(*stack).toTensor();
  inside.op.callBoxed(stack);
  stack->emplace_back(std::move(token));
}

void StateOperators::define(const c10::OperatorHandle& op, StateKind kind, const c10::OperatorName& full) {
  const c10::FunctionSchema& schema = op.schema();
  const OperatorTraits& traits = traits_of(op);
  const auto refuse = [&](const char* why) {
    throw NotImplemented(fmt::format(
        "graph: {} {}, so that its state cannot be an argument and a result; use an operator "
        "that returns new tensors, or switch {} off",
        traits.name, why, kind == StateKind::Generator ? "explicit_random_states" : "effect_tokens"));
  };
  if (traits.mutates) refuse("writes its arguments");
  if (schema.is_vararg() || schema.is_varret()) refuse("has any number of arguments or results");
  // The state is set back after the call: what is drawn later would be missing.
  if (kind == StateKind::Generator && traits.any_alias) refuse("returns the memory of an argument");
  std::vector<c10::Argument> arguments = schema.arguments(), returns = schema.returns();
  const auto add = [&](std::string name, c10::TypePtr type) {
    arguments.emplace_back(std::move(name), std::move(type), c10::nullopt, c10::nullopt, /*kwarg_only=*/true);
  };
  add(kind == StateKind::Generator ? "state" : "token", c10::TensorType::get());
  if (kind == StateKind::Generator) add("state_of", c10::DeviceObjType::get());
  returns.emplace_back("", c10::TensorType::get());
  torch::Library& library = kind == StateKind::Generator ? random_ : effects_;
  library.def(c10::FunctionSchema(full.name, full.overload_name, std::move(arguments), std::move(returns)));
  const std::string bare = full.name.substr(full.name.find("::") + 2);
  const std::string name = full.overload_name.empty() ? bare : fmt::format("{}.{}", bare, full.overload_name);
  library.impl(name.c_str(),
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                               kind == StateKind::Generator
                                   ? torch::CppFunction::makeFromBoxedFunction<&call_with_generator_state>()
                                   : torch::CppFunction::makeFromBoxedFunction<&call_with_token>()));
}

}  // namespace

c10::OperatorHandle operator_with_state(const c10::OperatorHandle& op, StateKind kind) {
  return StateOperators::instance().with_state(op, kind);
}

std::optional<OperatorInside> operator_inside(const c10::OperatorHandle& op) {
  return StateOperators::instance().inside(op);
}

c10::optional<c10::OperatorHandle> find_operator(const std::string& name, const std::string& overload) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  if (const auto found = dispatcher.findSchema({name, overload})) return found;
  for (const StateKind kind : {StateKind::Token, StateKind::Generator}) {
    const std::string prefix = fmt::format("{}::", namespace_of(kind));
    if (!name.starts_with(prefix)) continue;
    const std::string bare = name.substr(prefix.size());
    // Namespaces and names may have underscores themselves.
    for (std::size_t end = bare.find(kSeparator); end != std::string::npos;
         end = bare.find(kSeparator, end + 1))
      if (const auto op = dispatcher.findSchema(
              {fmt::format("{}::{}", bare.substr(0, end), bare.substr(end + kSeparator.size())), overload}))
        return operator_with_state(*op, kind);
  }
  return c10::nullopt;
}

Geometry geometry_of_token() {
  Geometry geometry;
  geometry.sizes = {0};
  geometry.strides = {1};
  return geometry;
}

Geometry geometry_of_generator(at::Device device) {
  const GeneratorStateForm form = generator_state_form(device.type());
  Geometry geometry;
  geometry.sizes = {form.numel};
  geometry.strides = {1};
  geometry.dtype = form.dtype;
  return geometry;
}

at::Tensor make_token() {
  // Nobody writes it. Made below the dispatcher: a mode may be active.
  static const at::Tensor& token = *new at::Tensor(at::detail::empty_cpu({0}, at::kFloat));
  return token;
}

}  // namespace penstock::graph
