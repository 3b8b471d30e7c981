#include "penstock/graph/compiler/planner.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "penstock/graph/compiler/dead_memory.h"
#include "penstock/graph/compiler/unboxed_call.h"

namespace penstock::graph {
namespace {

// Operators that only make views, at all arguments. Others that may return a view (`contiguous`, `to`)
// sometimes copy.
constexpr std::array<std::string_view, 19> kViews = {"aten::_reshape_alias",
                                                     "aten::_unsafe_view",
                                                     "aten::alias",
                                                     "aten::as_strided",
                                                     "aten::detach",
                                                     "aten::diagonal",
                                                     "aten::expand",
                                                     "aten::permute",
                                                     "aten::select",
                                                     "aten::slice",
                                                     "aten::split",
                                                     "aten::split_with_sizes",
                                                     "aten::squeeze",
                                                     "aten::t",
                                                     "aten::transpose",
                                                     "aten::unbind",
                                                     "aten::unfold",
                                                     "aten::unsqueeze",
                                                     "aten::view"};

bool is_view(const Node& node) {
  return std::find(kViews.begin(), kViews.end(), node.op.operator_name().name) != kViews.end();
}

class Planner {
 public:
  Planner(const Graph& graph, const LastUses& last, const ExecutorOptions& options, Executor::Counts& counts)
      : graph_(graph),
        last_(last),
        options_(options),
        counts_(counts),
        may_overwrite_(graph.values.size(), 1) {
    plan_.slots = graph.values.size() + 1;
    for (const Placeholder& input : graph.inputs) may_overwrite_[index_of(input.value)] = 0;
    for (const ConstantTensor& constant : graph.constants) may_overwrite_[index_of(constant.value)] = 0;
    for (const std::size_t input : options.donated_inputs)
      may_overwrite_[index_of(graph.inputs.at(input).value)] = 1;
    keep_memory_of_other_operators();
  }

  ExecutionPlan run() {
    plan_.steps.reserve(graph_.nodes.size());
    for (position_ = 0; position_ < graph_.nodes.size(); ++position_) plan(graph_.nodes[position_]);
    return std::move(plan_);
  }

 private:
  // A collective may still read or write its tensors on another stream when its call returns, and the
  // operator of a user may return memory that it keeps.
  void keep_memory_of_other_operators() {
    std::vector<char> kept(static_cast<std::size_t>(graph_.storages), 0);
    const auto keep = [&](ValueId value) { kept[index_of(graph_[value].storage)] = 1; };
    for (const Node& node : graph_.nodes) {
      const std::string& name = node.op.operator_name().name;
      if (name.starts_with("aten::") || name.starts_with("penstock_random::aten__")) continue;
      for_each_value(node.arguments, keep);
      for_each_value(node.results, keep);
    }
    // `_unsafe_view` returns the memory of its argument, but its result has a storage of its own.
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const Node& node = graph_.nodes[i];
      bool is_kept = false;
      for_each_value(node.results,
                     [&](ValueId value) { is_kept |= kept[index_of(graph_[value].storage)] != 0; });
      if (is_kept && is_view(node)) for_each_value(node.arguments, keep);
    }
    for (std::size_t i = 0; i < may_overwrite_.size(); ++i)
      if (const std::int32_t storage = static_cast<std::int32_t>(graph_.values[i].storage);
          storage >= 0 && storage < graph_.storages && kept[static_cast<std::size_t>(storage)])
        may_overwrite_[i] = 0;
  }

  static Slot slot_of(ValueId value) { return static_cast<Slot>(index_of(value)); }
  Slot slot_or_undefined(ValueId value) const {
    return value == kNoValue ? plan_.undefined_slot() : slot_of(value);
  }

  void plan(const Node& node) {
    Step step{.op = node.op, .grad_enabled = node.grad_enabled};
    for (const Operand& operand : node.arguments) step.arguments.push_back(argument(operand));
    for (const Operand& operand : node.results) step.results.push_back(result(operand));
    mark_last_uses(node, step);
    // A result that nobody uses is dropped, unless it is the written argument.
    finish(step);
    if (options_.direct_views) use_view(node, step);
    if (options_.reuse_memory && !step.otherwise) use_dead_memory(node, step);
    plan_.steps.push_back(std::move(step));
  }

  Argument argument(const Operand& operand) {
    Argument argument;
    switch (operand.kind) {
      case Operand::Kind::Constant:
        if (operand.symbolic != kNotSymbolic) {
          argument.kind = Argument::Kind::Symbolic;
          argument.slot = static_cast<std::uint32_t>(operand.symbolic);
        } else {
          auto constant = std::make_shared<const c10::IValue>(operand.constant);
          argument.constant = constant.get();
          plan_.owned.push_back(std::move(constant));
        }
        break;
      case Operand::Kind::Tensor:
        argument.kind = Argument::Kind::Tensor;
        argument.slot = slot_or_undefined(operand.values[0]);
        break;
      case Operand::Kind::TensorList:
      case Operand::Kind::OptionalTensorList: {
        argument.kind =
            operand.kind == Operand::Kind::TensorList ? Argument::Kind::List : Argument::Kind::OptionalList;
        argument.slot = static_cast<std::uint32_t>(plan_.lists.size());
        std::vector<Slot> slots;
        for (const ValueId value : operand.values) slots.push_back(slot_or_undefined(value));
        plan_.lists.push_back(std::move(slots));
        break;
      }
    }
    return argument;
  }

  Result result(const Operand& operand) {
    if (operand.kind == Operand::Kind::Tensor && last_.after(position_, operand.values[0]))
      return {Result::Kind::Tensor, slot_of(operand.values[0])};
    if (operand.kind != Operand::Kind::TensorList) return {};
    std::vector<Slot> slots;
    for (const ValueId value : operand.values)
      slots.push_back(last_.after(position_, value) ? slot_of(value) : kNoSlot);
    plan_.lists.push_back(std::move(slots));
    return {Result::Kind::List, static_cast<std::uint32_t>(plan_.lists.size() - 1)};
  }

  // Every tensor that is not used afterwards is freed after the call; a boxed call may take it earlier if it
  // occurs once.
  void mark_last_uses(const Node& node, Step& step) {
    c10::SmallVector<Slot, 8> seen;
    for_each_value(node.arguments, [&](ValueId value) {
      if (last_.of(value) != position_) return;
      if (std::find(seen.begin(), seen.end(), slot_of(value)) == seen.end())
        step.frees.push_back(slot_of(value));
      seen.push_back(slot_of(value));
    });
    for (Argument& argument : step.arguments)
      argument.last_use =
          argument.kind == Argument::Kind::Tensor && std::count(seen.begin(), seen.end(), argument.slot) == 1;
  }

  void finish(Step& step) {
    step.call = &call_boxed;
    if (options_.unboxed && make_unboxed(step, plan_))
      ++counts_.unboxed;
    else
      ++counts_.boxed;
  }

  // A step that can be done without its operator.
  void use_view(const Node& node, Step& step) {
    if (!is_view(node)) return;
    if (node.arguments[0].value() == kNoValue || node.results.size() != 1) return;
    DirectView view{.base = slot_of(node.arguments[0].value()), .made = {}};
    for (const ValueId value : node.results[0].values)
      view.made.push_back(last_.after(position_, value) ? slot_of(value) : kNoSlot);
    step.otherwise = std::exchange(step.call, &call_view);
    step.special = static_cast<std::uint32_t>(plan_.views.size());
    plan_.views.push_back(std::move(view));
    ++counts_.views;
  }

  // A pointwise step that may write its result over an argument.
  void use_dead_memory(const Node& node, Step& step) {
    if (node.results.size() != 1 || step.results[0].kind != Result::Kind::Tensor) return;
    const std::optional<WritingForm> form = writing_form(node.op);
    if (!form) return;
    const Value& result = graph_[node.results[0].values[0]];
    for (std::size_t i = 0; i < step.arguments.size(); ++i) {
      if (form->in_place && i > 0) return;
      const Argument& argument = step.arguments[i];
      if (!argument.last_use) continue;
      const ValueId dead = node.arguments[i].value();
      if (!may_overwrite_[index_of(dead)] || graph_[dead].geometry != result.geometry) continue;
      if (overlaps_itself(result.geometry)) continue;
      MemoryReuse reuse{.dead = argument.slot,
                        .result = step.results[0].slot,
                        .geometry = result.geometry,
                        .writing = {.op = form->op, .grad_enabled = step.grad_enabled}};
      for (const Operand& operand : node.arguments)
        reuse.writing.arguments.push_back(this->argument(operand));
      if (!form->in_place) reuse.writing.arguments.push_back(reuse.writing.arguments[i]);
      reuse.writing.results.push_back({});
      // Without an unboxed form, nothing is gained.
      if (!make_unboxed(reuse.writing, plan_)) return;
      step.otherwise = std::exchange(step.call, &call_reusing);
      step.special = static_cast<std::uint32_t>(plan_.reuses.size());
      plan_.reuses.push_back(std::move(reuse));
      ++counts_.reuses;
      return;
    }
  }

  const Graph& graph_;
  const LastUses& last_;
  const ExecutorOptions& options_;
  Executor::Counts& counts_;
  std::vector<char> may_overwrite_;  // by value; what is not known at run time
  std::size_t position_ = 0;
  ExecutionPlan plan_;
};

}  // namespace

LastUses::LastUses(const Graph& graph) : last_(graph.values.size(), kNever) {
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    for_each_value(graph.nodes[i].arguments, [&](ValueId value) { last_[index_of(value)] = i; });
  for_each_value(graph.outputs, [&](ValueId value) { last_[index_of(value)] = kAtTheEnd; });
  for (const ConstantTensor& constant : graph.constants) last_[index_of(constant.value)] = kAtTheEnd;
}

ExecutionPlan plan_run(const Graph& graph, const LastUses& last_uses, const ExecutorOptions& options,
                       Executor::Counts& counts) {
  return Planner(graph, last_uses, options, counts).run();
}

}  // namespace penstock::graph
