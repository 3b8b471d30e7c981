#include "penstock/graph/compiler/execute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kNever = static_cast<std::size_t>(-1);
constexpr std::size_t kAtTheEnd = static_cast<std::size_t>(-2);

// The index of the node that uses a value last; kAtTheEnd for outputs.
std::vector<std::size_t> last_uses(const Graph& graph) {
  std::vector<std::size_t> last(graph.values.size(), kNever);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for_each_value(graph.nodes[i].arguments, [&](ValueId value) { last[index_of(value)] = i; });
  }
  for_each_value(graph.outputs, [&](ValueId value) { last[index_of(value)] = kAtTheEnd; });
  return last;
}

}  // namespace

Executor::Executor(const Graph& graph) : outputs_(graph.outputs), slot_count_(graph.values.size()) {
  verify(graph);
  needs_sizes_ = graph.table && !(graph.table->constants.empty() && graph.table->tensors.empty());
  const std::vector<std::size_t> last_use = last_uses(graph);
  for (const Placeholder& input : graph.inputs)
    inputs_.push_back(static_cast<std::uint32_t>(index_of(input.value)));
  for (const ConstantTensor& constant : graph.constants)
    constants_.push_back(
        {static_cast<std::uint32_t>(index_of(constant.value)), constant.tensor, constant.symbolic});
  steps_.reserve(graph.nodes.size());
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) plan_node(graph, graph.nodes[i], i, last_use);
}

void Executor::plan_node(const Graph&, const Node& node, std::size_t position,
                         const std::vector<std::size_t>& last_use) {
  // A tensor is pushed by move if this node is its last use, unless it occurs twice among the arguments or is
  // also the result: then it is freed after the call.
  c10::SmallVector<ValueId, 8> seen;
  c10::SmallVector<ValueId, 8> results;
  for_each_value(node.results, [&](ValueId value) { results.push_back(value); });
  const auto contains = [](const auto& list, ValueId value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  std::size_t uses = 0;
  const auto count_uses = [&](ValueId wanted) {
    uses = 0;
    for_each_value(node.arguments, [&](ValueId value) { uses += value == wanted ? 1 : 0; });
    return uses;
  };
  for (const Operand& operand : node.arguments) {
    Push what;
    switch (operand.kind) {
      case Operand::Kind::Constant:
        if (operand.symbolic != kNotSymbolic) {
          what = {Push::Kind::Symbolic, static_cast<std::uint32_t>(operand.symbolic)};
          break;
        }
        what = {Push::Kind::Constant, static_cast<std::uint32_t>(plain_.size())};
        plain_.push_back(operand.constant);
        break;
      case Operand::Kind::Tensor: {
        const ValueId value = operand.values[0];
        if (value == kNoValue) {
          what.kind = Push::Kind::Undefined;
          break;
        }
        const bool last =
            last_use[index_of(value)] == position && !contains(results, value) && count_uses(value) == 1;
        what = {last ? Push::Kind::Move : Push::Kind::Copy, static_cast<std::uint32_t>(index_of(value))};
        if (!last && last_use[index_of(value)] == position && !contains(seen, value)) {
          frees_.push_back(static_cast<std::uint32_t>(index_of(value)));
          seen.push_back(value);
        }
        break;
      }
      case Operand::Kind::TensorList:
      case Operand::Kind::OptionalTensorList: {
        what = {operand.kind == Operand::Kind::TensorList ? Push::Kind::List : Push::Kind::OptionalList,
                static_cast<std::uint32_t>(lists_.size())};
        std::vector<ListItem> items;
        for (const ValueId value : operand.values) {
          items.push_back({static_cast<std::int32_t>(value)});
          if (value != kNoValue && last_use[index_of(value)] == position && !contains(seen, value)) {
            frees_.push_back(static_cast<std::uint32_t>(index_of(value)));
            seen.push_back(value);
          }
        }
        lists_.push_back(std::move(items));
        break;
      }
    }
    pushes_.push_back(what);
  }
  for (const Operand& result : node.results) {
    Keep keep;
    if (result.kind == Operand::Kind::Tensor && result.values[0] != kNoValue &&
        last_use[index_of(result.values[0])] != kNever) {
      const std::size_t last = last_use[index_of(result.values[0])];
      // A written argument that is not read afterwards is not kept; it is freed above.
      if (last == kAtTheEnd || last > position)
        keep = {Keep::Kind::Tensor, static_cast<std::uint32_t>(index_of(result.values[0]))};
    } else if (result.kind == Operand::Kind::TensorList) {
      keep = {Keep::Kind::List, static_cast<std::uint32_t>(lists_.size())};
      std::vector<ListItem> items;
      for (const ValueId value : result.values) {
        const bool used = value != kNoValue && last_use[index_of(value)] != kNever &&
                          (last_use[index_of(value)] == kAtTheEnd || last_use[index_of(value)] > position);
        items.push_back({used ? static_cast<std::int32_t>(value) : -1});
      }
      lists_.push_back(std::move(items));
    }
    keeps_.push_back(keep);
  }
  steps_.push_back({node.op, node.grad_enabled, static_cast<std::uint32_t>(pushes_.size()),
                    static_cast<std::uint32_t>(keeps_.size()), static_cast<std::uint32_t>(frees_.size())});
}

void Executor::push(std::vector<at::Tensor>& slots, const Push& what, const BoundSizes* sizes,
                    Stack* stack) const {
  switch (what.kind) {
    case Push::Kind::Constant:
      stack->push_back(plain_[what.slot]);
      break;
    case Push::Kind::Symbolic:
      stack->push_back(sizes->constants[what.slot]);
      break;
    case Push::Kind::Copy:
      stack->emplace_back(slots[what.slot]);
      break;
    case Push::Kind::Move:
      stack->emplace_back(std::move(slots[what.slot]));
      break;
    case Push::Kind::Undefined:
      stack->emplace_back(at::Tensor());
      break;
    case Push::Kind::List: {
      c10::List<at::Tensor> list;
      list.reserve(lists_[what.slot].size());
      for (const ListItem item : lists_[what.slot])
        list.push_back(item.slot < 0 ? at::Tensor() : slots[static_cast<std::size_t>(item.slot)]);
      stack->emplace_back(std::move(list));
      break;
    }
    case Push::Kind::OptionalList: {
      c10::List<c10::optional<at::Tensor>> list;
      list.reserve(lists_[what.slot].size());
      for (const ListItem item : lists_[what.slot])
        list.push_back(item.slot < 0 ? c10::optional<at::Tensor>()
                                     : c10::optional<at::Tensor>(slots[static_cast<std::size_t>(item.slot)]));
      stack->emplace_back(std::move(list));
      break;
    }
  }
}

std::vector<c10::IValue> Executor::operator()(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const {
  if (inputs.size() != inputs_.size())
    throw ValueError(describe("graph: number of inputs", std::to_string(inputs.size()),
                              std::to_string(inputs_.size()), "pass one tensor for each input of the graph"));
  if (needs_sizes_ && !sizes)
    throw ValueError(
        "graph: the graph has symbols, but no sizes were passed; pass the result of graph.table->at() for "
        "the sizes of this run");
  const at::AutoDispatchBelowADInplaceOrView below;
  // Casts that apply were recorded as nodes.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  std::vector<at::Tensor> slots(slot_count_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined())
      throw ValueError(
          fmt::format("graph: input {} is undefined, expected a tensor; pass every input of the graph", i));
    slots[inputs_[i]] = std::move(inputs[i]);
  }
  for (const FoundTensor& found : constants_)
    slots[found.slot] = found.symbolic == kNotSymbolic
                            ? found.tensor
                            : sizes->tensors[static_cast<std::size_t>(found.symbolic)];

  Stack stack;
  const c10::AutoGradMode grad_mode(c10::GradMode::is_enabled());  // restored at the end
  bool grad_enabled = c10::GradMode::is_enabled();
  std::uint32_t pushed = 0, kept = 0, freed = 0;
  for (const Step& step : steps_) {
    stack.clear();
    for (; pushed < step.pushes_end; ++pushed) push(slots, pushes_[pushed], sizes, &stack);
    if (step.grad_enabled != grad_enabled) c10::GradMode::set_enabled(grad_enabled = step.grad_enabled);
    step.op.callBoxed(&stack);
    for (std::size_t result = 0; kept < step.keeps_end; ++kept, ++result) {
      const Keep& keep = keeps_[kept];
      if (keep.kind == Keep::Kind::Tensor) {
        slots[keep.slot] = std::move(stack[result]).toTensor();
      } else if (keep.kind == Keep::Kind::List) {
        const std::vector<ListItem>& items = lists_[keep.slot];
        const c10::ArrayRef<c10::IValue> list = stack[result].toListRef();
        PENSTOCK_INVARIANT(list.size() == items.size(),
                           "an operator returned a list of a different length than recorded");
        for (std::size_t i = 0; i < items.size(); ++i)
          if (items[i].slot >= 0) slots[static_cast<std::size_t>(items[i].slot)] = list[i].toTensor();
      }
    }
    for (; freed < step.frees_end; ++freed) slots[frees_[freed]].reset();
  }

  std::vector<c10::IValue> results;
  results.reserve(outputs_.size());
  for (const Operand& output : outputs_) {
    if (output.kind == Operand::Kind::Constant)
      results.push_back(output.symbolic == kNotSymbolic
                            ? output.constant
                            : sizes->constants[static_cast<std::size_t>(output.symbolic)]);
    else
      results.emplace_back(output.values[0] == kNoValue ? at::Tensor() : slots[index_of(output.values[0])]);
  }
  return results;
}

}  // namespace penstock::graph
