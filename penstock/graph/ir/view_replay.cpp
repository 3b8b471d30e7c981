#include "penstock/graph/ir/view_replay.h"

#include <algorithm>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/ir/constant_value.h"
#include "penstock/graph/ir/functionalize.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

// The step that made `view`, and its base.
struct FoundStep {
  ViewStep step;
  ValueId of = kNoValue;
};

std::optional<FoundStep> step_to(const Node& node, ValueId view) {
  const OperatorTraits& traits = traits_of(node.op);
  for (std::size_t i = 0; i < node.results.size(); ++i) {
    const Operand& result = node.results[i];
    const auto place = std::find(result.values.begin(), result.values.end(), view);
    if (place == result.values.end()) continue;
    const ReturnAlias& alias = traits.returns[i];
    if (alias.kind == ReturnAlias::Kind::Fresh) return std::nullopt;
    const auto viewed = static_cast<std::size_t>(alias.argument);
    if (node.arguments[viewed].value() == kNoValue) return std::nullopt;
    c10::OperatorHandle op = node.op;
    if (alias.kind == ReturnAlias::Kind::Same) {
      const auto sibling = functional_counterpart(op);
      if (!sibling || !traits_of(*sibling).pure_view) return std::nullopt;
      op = *sibling;
    }
    FoundStep found{{op, node.arguments, viewed, i, std::nullopt}, node.arguments[viewed].value()};
    if (result.kind == Operand::Kind::TensorList)
      found.step.element = static_cast<std::size_t>(place - result.values.begin());
    found.step.arguments[viewed] = Operand::of(kNoValue);
    for (const Operand& argument : found.step.arguments)
      for (const ValueId value : argument.values)
        if (value != kNoValue) return std::nullopt;
    return found;
  }
  return std::nullopt;
}

bool same_step_operand(const Operand& a, const Operand& b) {
  if (a.kind != b.kind || a.values != b.values || a.symbolic != b.symbolic) return false;
  return a.kind != Operand::Kind::Constant || same_constant(a.constant, b.constant);
}

}  // namespace

bool ViewStep::operator==(const ViewStep& other) const {
  return op.operator_name() == other.op.operator_name() && viewed == other.viewed && result == other.result &&
         element == other.element &&
         std::equal(arguments.begin(), arguments.end(), other.arguments.begin(), other.arguments.end(),
                    same_step_operand);
}

at::Tensor ViewReplay::apply(at::Tensor base, const BoundSizes* sizes) const {
  std::vector<c10::IValue> stack;
  for (const ViewStep& step : steps) {
    stack.clear();
    for (std::size_t i = 0; i < step.arguments.size(); ++i) {
      const Operand& argument = step.arguments[i];
      if (i == step.viewed)
        stack.emplace_back(std::move(base));
      else if (argument.kind != Operand::Kind::Constant)
        stack.emplace_back(at::Tensor());
      else
        stack.push_back(argument.symbolic == kNotSymbolic
                            ? argument.constant
                            : sizes->constants[static_cast<std::size_t>(argument.symbolic)]);
    }
    step.op.callBoxed(&stack);
    base =
        step.element ? stack[step.result].toTensorVector().at(*step.element) : stack[step.result].toTensor();
  }
  return base;
}

std::optional<ViewReplay> find_view_replay(const Graph& graph, ValueId base, ValueId view) {
  const auto holds = [](const std::vector<Operand>& operands, ValueId wanted) {
    bool any = false;
    for_each_value(operands, [&](ValueId value) { any |= value == wanted; });
    return any;
  };
  ViewReplay replay;
  // Values are defined before they are used: one backward pass over the nodes is enough.
  for (std::size_t i = graph.nodes.size(); i-- > 0 && view != base;) {
    const Node& node = graph.nodes[i];
    // A node that both takes and returns a value has written it; an earlier node made it.
    if (!holds(node.results, view) || holds(node.arguments, view)) continue;
    std::optional<FoundStep> found = step_to(node, view);
    if (!found) return std::nullopt;
    replay.steps.push_back(std::move(found->step));
    view = found->of;
  }
  if (view != base) return std::nullopt;
  std::reverse(replay.steps.begin(), replay.steps.end());
  return replay;
}

}  // namespace penstock::graph
