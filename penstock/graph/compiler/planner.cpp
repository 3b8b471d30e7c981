#include "penstock/graph/compiler/planner.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>

#include "penstock/graph/compiler/dead_memory.h"
#include "penstock/graph/compiler/direct_kernel.h"
#include "penstock/graph/compiler/generated_kernel.h"
#include "penstock/graph/compiler/unboxed_call.h"
#include "penstock/operator_traits.h"

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

// What decides how the calls of an operator are planned.
struct OperatorFacts {
  OperatorFacts(const c10::OperatorHandle& op, PlanMemory& memory)
      : is_view(std::find(kViews.begin(), kViews.end(), op.operator_name().name) != kViews.end()),
        writing(writing_form(op)),
        unboxed(unboxed_form(op, memory)) {
    const std::string& name = op.operator_name().name;
    is_known = name.starts_with("aten::") || name.starts_with("penstock_random::aten__") ||
               name.starts_with("penstock_fused::");
    if (writing) writing_unboxed = unboxed_form(writing->op, memory);
  }
  bool is_view = false;
  bool is_known = false;  // an operator of LibTorch, or generated code, which keeps no memory
  std::optional<WritingForm> writing;
  UnboxedForm unboxed, writing_unboxed;
};

class Planner {
 public:
  Planner(const Graph& graph, const LastUses& last, const ExecutorOptions& options, Executor::Counts& counts)
      : graph_(graph),
        last_(last),
        options_(options),
        counts_(counts),
        may_overwrite_(graph.values.size(), 1),
        plan_(std::make_unique<ExecutionPlan>()) {
    plan_->slots = graph.values.size() + 1;
    for (const Placeholder& input : graph.inputs) may_overwrite_[index_of(input.value)] = 0;
    for (const ConstantTensor& constant : graph.constants) may_overwrite_[index_of(constant.value)] = 0;
    for (const std::size_t input : options.donated_inputs)
      may_overwrite_[index_of(graph.inputs.at(input).value)] = 1;
    keep_memory();
  }

  std::unique_ptr<ExecutionPlan> run() {
    plan_->steps.reserve(graph_.nodes.size());
    for (position_ = 0; position_ < graph_.nodes.size(); ++position_) plan(graph_.nodes[position_]);
    return std::move(plan_);
  }

 private:
  // Found once for each operator of the graph.
  const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
    const std::size_t index = operator_index(op);
    if (index >= known_.size()) known_.resize(index + 64, nullptr);
    if (!known_[index]) known_[index] = &facts_.emplace_back(op, plan_->memory);
    return *known_[index];
  }

  // What is in the memory of an input or constant that stays, stays as well. A collective may still read or
  // write its tensors on another stream when its call returns, and the operator of a user may return memory
  // that it keeps.
  void keep_memory() {
    std::vector<char> kept(static_cast<std::size_t>(graph_.storages), 0);
    const auto keep = [&](ValueId value) { kept[index_of(graph_[value].storage)] = 1; };
    const auto keep_whole = [&](ValueId value) {
      if (!may_overwrite_[index_of(value)]) keep(value);
    };
    for (const Placeholder& input : graph_.inputs) keep_whole(input.value);
    for (const ConstantTensor& constant : graph_.constants) keep_whole(constant.value);
    for (const Node& node : graph_.nodes) {
      if (facts_of(node.op).is_known) continue;
      for_each_value(node.arguments, keep);
      for_each_value(node.results, keep);
    }
    for (std::size_t i = 0; i < may_overwrite_.size(); ++i)
      if (const std::int32_t storage = static_cast<std::int32_t>(graph_.values[i].storage);
          storage >= 0 && storage < graph_.storages && kept[static_cast<std::size_t>(storage)])
        may_overwrite_[i] = 0;
  }

  static Slot slot_of(ValueId value) { return static_cast<Slot>(index_of(value)); }
  Slot slot_or_undefined(ValueId value) const {
    return value == kNoValue ? plan_->undefined_slot() : slot_of(value);
  }

  void plan(const Node& node) {
    const OperatorFacts& facts = facts_of(node.op);
    Step step{.op = node.op, .grad_enabled = node.grad_enabled};
    step.arguments = arguments(node);
    step.results = plan_->memory.list<Result>(node.results.size());
    for (std::size_t i = 0; i < node.results.size(); ++i) step.results[i] = result(node.results[i]);
    mark_last_uses(node, step);
    if (const GeneratedKernel* kernel = generated_kernel(node)) {
      call_kernel(*kernel, node, step);
      plan_->steps.push_back(std::move(step));
      return;
    }
    // A result that nobody uses is dropped, unless it is the written argument.
    finish(facts, step);
    if (options_.direct_views && facts.is_view) use_view(node, step);
    if (options_.reuse_memory && facts.writing && !step.otherwise) use_dead_memory(node, facts, step);
    if (options_.direct_kernels && facts.is_known && !step.otherwise) use_direct_kernel(node, step);
    plan_->steps.push_back(std::move(step));
  }

  // `more`: room for further ones.
  std::span<Argument> arguments(const Node& node, std::size_t more = 0) {
    const std::span<Argument> all = plan_->memory.list<Argument>(node.arguments.size() + more);
    for (std::size_t i = 0; i < node.arguments.size(); ++i) all[i] = argument(node.arguments[i]);
    return all;
  }

  // Constants are those of the node until finish().
  Argument argument(const Operand& operand) {
    Argument argument;
    switch (operand.kind) {
      case Operand::Kind::Constant:
        if (operand.symbolic != kNotSymbolic) {
          argument.kind = Argument::Kind::Symbolic;
          argument.slot = static_cast<std::uint32_t>(operand.symbolic);
        } else {
          argument.constant = &operand.constant;
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
        argument.slot = static_cast<std::uint32_t>(plan_->lists.size());
        const std::span<Slot> slots = plan_->memory.list<Slot>(operand.values.size());
        std::transform(operand.values.begin(), operand.values.end(), slots.begin(),
                       [&](ValueId value) { return slot_or_undefined(value); });
        plan_->lists.push_back(slots);
        break;
      }
    }
    return argument;
  }

  // The slots of results, kNoSlot for those that are not used.
  std::span<const Slot> used_slots(const Operand& operand) {
    const std::span<Slot> slots = plan_->memory.list<Slot>(operand.values.size());
    std::transform(operand.values.begin(), operand.values.end(), slots.begin(),
                   [&](ValueId value) { return last_.after(position_, value) ? slot_of(value) : kNoSlot; });
    return slots;
  }

  Result result(const Operand& operand) {
    if (operand.kind == Operand::Kind::Tensor && last_.after(position_, operand.values[0]))
      return {Result::Kind::Tensor, slot_of(operand.values[0])};
    if (operand.kind != Operand::Kind::TensorList) return {};
    plan_->lists.push_back(used_slots(operand));
    return {Result::Kind::List, static_cast<std::uint32_t>(plan_->lists.size() - 1)};
  }

  // Every tensor that is not used afterwards is freed after the call; a boxed call may take it earlier if it
  // occurs once.
  void mark_last_uses(const Node& node, Step& step) {
    c10::SmallVector<Slot, 8> seen, frees;
    for_each_value(node.arguments, [&](ValueId value) {
      if (last_.of(value) != position_) return;
      if (std::find(seen.begin(), seen.end(), slot_of(value)) == seen.end()) frees.push_back(slot_of(value));
      seen.push_back(slot_of(value));
    });
    if (seen.empty()) return;
    step.frees = plan_->memory.copy(std::span<const Slot>(frees.data(), frees.size()));
    for (Argument& argument : step.arguments)
      argument.last_use =
          argument.kind == Argument::Kind::Tensor && std::count(seen.begin(), seen.end(), argument.slot) == 1;
  }

  void finish(const OperatorFacts& facts, Step& step) {
    if (options_.unboxed && make_unboxed(step, facts.unboxed, plan_->memory)) {
      ++counts_.unboxed;
      return;
    }
    ++counts_.boxed;
    step.call = &call_boxed;
    for (Argument& argument : step.arguments)
      if (argument.kind == Argument::Kind::Constant)
        argument.constant =
            plan_->memory.make<c10::IValue>(*static_cast<const c10::IValue*>(argument.constant));
  }

  void call_kernel(const GeneratedKernel& kernel, const Node& node, Step& step) {
    GeneratedCall call{.kernel = &kernel,
                       .inputs = plan_->lists[step.arguments[0].slot],
                       .results = plan_->lists[step.results[0].slot]};
    std::vector<char> is_taken(call.inputs.size(), 0);
    std::vector<char> is_given(call.results.size(), 0);
    for (const GeneratedKernel::Sharing& sharing : kernel.sharing()) {
      if (!options_.reuse_memory || is_taken.at(sharing.input) || is_given.at(sharing.result)) continue;
      const ValueId dead = node.arguments[0].values[sharing.input],
                    result = node.results[0].values[sharing.result];
      if (last_.of(dead) != position_ || !may_overwrite_[index_of(dead)] ||
          graph_[dead].geometry != graph_[result].geometry)
        continue;
      is_taken[sharing.input] = is_given[sharing.result] = 1;
      call.reuses.push_back({.dead = slot_of(dead),
                             .result = sharing.result,
                             .geometry = plan_->memory.make<Geometry>(graph_[result].geometry)});
    }
    if (!call.reuses.empty()) ++counts_.reuses;
    step.call = &call_generated;
    step.special = static_cast<std::uint32_t>(plan_->generated.size());
    plan_->generated.push_back(std::move(call));
    ++counts_.generated;
  }

  // A step that can be done without its operator.
  void use_view(const Node& node, Step& step) {
    if (node.arguments[0].value() == kNoValue || node.results.size() != 1) return;
    step.otherwise = std::exchange(step.call, &call_view);
    step.special = static_cast<std::uint32_t>(plan_->views.size());
    plan_->views.push_back({.base = slot_of(node.arguments[0].value()), .made = used_slots(node.results[0])});
    ++counts_.views;
  }

  // A step that may compute without its operator.
  void use_direct_kernel(const Node& node, Step& step) {
    step.kernel = direct_kernel(node);
    if (!step.kernel) return;
    step.otherwise = std::exchange(step.call, &call_direct);
    ++counts_.kernels;
  }

  // A pointwise step that may write its result over an argument.
  void use_dead_memory(const Node& node, const OperatorFacts& facts, Step& step) {
    if (node.results.size() != 1 || step.results[0].kind != Result::Kind::Tensor) return;
    const bool in_place = facts.writing->in_place;
    const Value& result = graph_[node.results[0].values[0]];
    for (std::size_t i = 0; i < step.arguments.size(); ++i) {
      if (in_place && i > 0) return;
      const Argument& argument = step.arguments[i];
      if (!argument.last_use) continue;
      const ValueId dead = node.arguments[i].value();
      if (!may_overwrite_[index_of(dead)] || graph_[dead].geometry != result.geometry) continue;
      if (overlaps_itself(result.geometry)) continue;
      Step writing{.op = facts.writing->op, .grad_enabled = step.grad_enabled};
      writing.arguments = arguments(node, in_place ? 0 : 1);
      if (!in_place) writing.arguments.back() = writing.arguments[i];
      writing.results = plan_->memory.list<Result>(1);
      // Without an unboxed form, nothing is gained.
      if (!make_unboxed(writing, facts.writing_unboxed, plan_->memory)) return;
      step.otherwise = std::exchange(step.call, &call_reusing);
      step.special = static_cast<std::uint32_t>(plan_->reuses.size());
      plan_->reuses.push_back({.dead = argument.slot,
                               .result = step.results[0].slot,
                               .geometry = result.geometry,
                               .writing = std::move(writing)});
      ++counts_.reuses;
      return;
    }
  }

  const Graph& graph_;
  const LastUses& last_;
  const ExecutorOptions& options_;
  Executor::Counts& counts_;
  std::vector<char> may_overwrite_;  // by value; what is not known at run time
  std::deque<OperatorFacts> facts_;
  std::vector<const OperatorFacts*> known_;  // by operator_index()
  std::size_t position_ = 0;
  std::unique_ptr<ExecutionPlan> plan_;
};

}  // namespace

LastUses::LastUses(const Graph& graph) : last_(graph.values.size(), kNever) {
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    for_each_value(graph.nodes[i].arguments, [&](ValueId value) { last_[index_of(value)] = i; });
  for_each_value(graph.outputs, [&](ValueId value) { last_[index_of(value)] = kAtTheEnd; });
  for (const ConstantTensor& constant : graph.constants) last_[index_of(constant.value)] = kAtTheEnd;
}

std::unique_ptr<ExecutionPlan> plan_run(const Graph& graph, const LastUses& last_uses,
                                        const ExecutorOptions& options, Executor::Counts& counts) {
  return Planner(graph, last_uses, options, counts).run();
}

}  // namespace penstock::graph
