#include "penstock/graph/stages/node_replay.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/autograd_node.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/dispatch/once_differentiable.h"

namespace penstock::graph {

using torch::autograd::variable_list;

// The steps are shared by the replay and the autograd nodes it makes. A slot holds a tensor during a run.
struct ReplaySteps {
  using Slot = std::int32_t;
  static constexpr Slot kNoSlot = -1;
  // An operand with slots in place of values.
  struct SlotOperand {
    Operand::Kind kind = Operand::Kind::Constant;
    c10::IValue constant;
    c10::SmallVector<Slot, 2> slots;
  };
  struct Function;
  struct Step {
    std::optional<c10::OperatorHandle> op;  // empty: `function` gets its history
    bool reshapes = false;                  // see run_node
    bool grad_enabled = true;
    std::vector<SlotOperand> arguments;
    std::vector<SlotOperand> results;
    std::shared_ptr<const Function> function;
    std::vector<Slot> released;  // after it
  };
  // A user-defined autograd function.
  struct Function {
    std::string name;
    std::vector<Slot> inputs, outputs, saved;       // of the forward
    std::vector<std::optional<Geometry>> tangents;  // by output
    std::shared_ptr<const ReplaySteps> backward;    // takes the tangents, then what is saved
  };

  std::vector<Step> steps;
  std::vector<Slot> inputs;
  std::vector<std::pair<Slot, at::Tensor>> constants;
  std::vector<SlotOperand> outputs;
  std::size_t slots = 0;
  bool any_grad_mode = false;  // a backward: nodes run under the mode of the caller

  std::vector<c10::IValue> run(std::vector<at::Tensor> given) const;
  void run_node(const Step& step, std::vector<at::Tensor>& slots, Stack& stack) const;
};

namespace {

using ReplaySlot = ReplaySteps::Slot;
using ReplayOperand = ReplaySteps::SlotOperand;
constexpr ReplaySlot kNoReplaySlot = ReplaySteps::kNoSlot;

// What a user-defined autograd function is in a replay.
class TracedFunction final : public torch::autograd::Node {
 public:
  explicit TracedFunction(std::shared_ptr<const ReplaySteps::Function> function)
      : function_(std::move(function)), step_(StepContext::current()) {}

  std::string name() const override { return "Traced<" + function_->name + ">"; }
  void save(const at::Tensor& tensor) { saved_.emplace_back(tensor, tensor.grad_fn().get() == this); }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (torch::autograd::SavedVariable& variable : saved_) variable.reset_data();
    released_ = true;
  }

 protected:
  variable_list apply(variable_list&& gradients) override {
    std::vector<at::Tensor> inputs;
    for (std::size_t i = 0; i < function_->tangents.size(); ++i)
      inputs.push_back(function_->tangents[i] ? as_recorded(gradients[i], *function_->tangents[i], i)
                                              : at::Tensor());
    {
      const std::lock_guard lock(mutex_);
      TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
      for (const torch::autograd::SavedVariable& variable : saved_)
        inputs.push_back(variable.unpack(held(*this)));
    }
    const bool recorded = c10::GradMode::is_enabled();
    variable_list results;
    {
      const c10::AutoGradMode unrecorded(false);
      // Random operators of the backward complete their keys now, and are to draw what forward has drawn.
      std::optional<StepGuard> of_forward;
      if (step_->running) of_forward.emplace(step_);
      for (const c10::IValue& gradient : function_->backward->run(std::move(inputs)))
        results.push_back(gradient.isTensor() ? gradient.toTensor() : at::Tensor());
    }
    // The backward was traced below autograd, where what it saved has no history.
    if (recorded) refuse_second_derivative(function_->name.c_str(), gradients, next_edges(), results);
    return results;
  }

 private:
  // Backward was recorded for contiguous gradients, and views them. A result that nothing used has none:
  // zeros.
  at::Tensor as_recorded(const at::Tensor& gradient, const Geometry& geometry, std::size_t result) const {
    if (!gradient.defined())
      return at::zeros(geometry.sizes, input_metadata(static_cast<std::uint32_t>(result)).options());
    return gradient.is_contiguous() && !gradient.is_conj() && !gradient.is_neg()
               ? gradient
               : gradient.resolve_conj().resolve_neg().contiguous();
  }

  std::shared_ptr<const ReplaySteps::Function> function_;
  std::shared_ptr<const StepContext> step_;  // of forward
  std::vector<torch::autograd::SavedVariable> saved_;
  bool released_ = false;
};

void give_history(const std::shared_ptr<const ReplaySteps::Function>& function,
                  std::vector<at::Tensor>& slots) {
  if (!c10::GradMode::is_enabled()) return;
  const auto at = [&](ReplaySlot slot) -> at::Tensor& { return slots[static_cast<std::size_t>(slot)]; };
  bool needed = false;
  torch::autograd::edge_list edges;
  for (const ReplaySlot input : function->inputs) {
    const bool differentiable = input != kNoReplaySlot && at(input).defined() && at(input).requires_grad();
    needed |= differentiable;
    edges.push_back(differentiable ? torch::autograd::impl::gradient_edge(at(input))
                                   : torch::autograd::Edge());
  }
  if (!needed) return;
  auto node = make_node<TracedFunction>(function);
  node->set_next_edges(std::move(edges));
  for (const ReplaySlot output : function->outputs) {
    if (output == kNoReplaySlot) {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
      continue;
    }
    const std::uint32_t number = node->add_input_metadata(at(output));
    torch::autograd::impl::set_gradient_edge(at(output), {node, number});
  }
  for (const ReplaySlot saved : function->saved) node->save(at(saved));
}

// ---- making the steps ----

class StepMaker {
 public:
  StepMaker(const Graph& graph, at::Device recorded_on, at::Device device)
      : graph_(graph), recorded_on_(recorded_on), device_(device) {}

  ReplaySlot slot_of(ValueId value) {
    if (value == kNoValue) return kNoReplaySlot;
    const auto [entry, is_new] = slot_of_.try_emplace(value, static_cast<ReplaySlot>(slot_of_.size()));
    return entry->second;
  }
  std::vector<ReplaySlot> slots_of(const std::vector<ValueId>& values) {
    std::vector<ReplaySlot> slots;
    for (const ValueId value : values) slots.push_back(slot_of(value));
    return slots;
  }

  ReplayOperand operand(const Operand& of) {
    ReplayOperand result{of.kind, of.constant, {}};
    if (of.kind == Operand::Kind::Constant) {
      if (of.constant.isDevice() && of.constant.toDevice() == recorded_on_) result.constant = device_;
      return result;
    }
    for (const ValueId value : of.values) result.slots.push_back(slot_of(value));
    return result;
  }

  ReplaySteps::Step step(const Node& node) {
    ReplaySteps::Step step;
    step.op = node.op;
    step.reshapes = node.op.operator_name().name == "aten::_reshape_alias";
    step.grad_enabled = node.grad_enabled;
    for (const Operand& argument : node.arguments) step.arguments.push_back(operand(argument));
    for (const Operand& result : node.results) step.results.push_back(operand(result));
    return step;
  }

  // Constants are among the first values that are used, and stay.
  void finish(ReplaySteps& steps) {
    for (const ConstantTensor& constant : graph_.constants)
      if (const auto slot = slot_of_.find(constant.value); slot != slot_of_.end())
        steps.constants.emplace_back(slot->second, constant.tensor.device() == recorded_on_
                                                       ? constant.tensor.to(device_)
                                                       : constant.tensor);
    steps.slots = slot_of_.size();
    std::vector<char> kept(steps.slots, 0);
    const auto keep = [&](ReplaySlot slot) {
      if (slot != kNoReplaySlot) kept[static_cast<std::size_t>(slot)] = 1;
    };
    for (const ReplayOperand& output : steps.outputs)
      for (const ReplaySlot slot : output.slots) keep(slot);
    for (std::size_t i = steps.steps.size(); i-- > 0;) {
      ReplaySteps::Step& step = steps.steps[i];
      const auto use = [&](ReplaySlot slot) {
        if (slot == kNoReplaySlot || std::exchange(kept[static_cast<std::size_t>(slot)], 1)) return;
        step.released.push_back(slot);
      };
      for (const auto* operands : {&step.arguments, &step.results})
        for (const ReplayOperand& operand : *operands)
          for (const ReplaySlot slot : operand.slots) use(slot);
      if (!step.function) continue;
      for (const auto* list : {&step.function->inputs, &step.function->outputs, &step.function->saved})
        for (const ReplaySlot slot : *list) use(slot);
    }
  }

  std::shared_ptr<const ReplaySteps::Function> function(const CustomFunction& of) {
    auto made = std::make_shared<ReplaySteps::Function>();
    made->name = of.name;
    made->inputs = slots_of(of.inputs);
    made->outputs = slots_of(of.outputs);
    made->saved = slots_of(of.saved);
    StepMaker maker(graph_, recorded_on_, device_);
    auto backward = std::make_shared<ReplaySteps>();
    backward->any_grad_mode = true;
    backward->inputs = maker.slots_of(of.tangents);
    for (const ReplaySlot saved : maker.slots_of(of.saved)) backward->inputs.push_back(saved);
    for (const ValueId tangent : of.tangents)
      made->tangents.push_back(tangent == kNoValue ? std::nullopt : std::optional(graph_[tangent].geometry));
    for (const Node& node : of.backward) backward->steps.push_back(maker.step(node));
    for (const Operand& gradient : of.gradients) backward->outputs.push_back(maker.operand(gradient));
    maker.finish(*backward);
    made->backward = std::move(backward);
    return made;
  }

 private:
  const Graph& graph_;
  at::Device recorded_on_, device_;
  std::unordered_map<ValueId, ReplaySlot> slot_of_;
};

c10::IValue argument_of(const ReplayOperand& operand, const std::vector<at::Tensor>& slots) {
  const auto at = [&](ReplaySlot slot) {
    return slot == kNoReplaySlot ? at::Tensor() : slots[static_cast<std::size_t>(slot)];
  };
  switch (operand.kind) {
    case Operand::Kind::Constant:
      return operand.constant;
    case Operand::Kind::Tensor:
      return at(operand.slots[0]);
    case Operand::Kind::TensorList: {
      c10::List<at::Tensor> list;
      for (const ReplaySlot slot : operand.slots) list.push_back(at(slot));
      return list;
    }
    case Operand::Kind::OptionalTensorList: {
      c10::List<c10::optional<at::Tensor>> list;
      for (const ReplaySlot slot : operand.slots)
        list.push_back(slot == kNoReplaySlot ? c10::optional<at::Tensor>()
                                             : c10::optional<at::Tensor>(at(slot)));
      return list;
    }
  }
  throw InvariantError("graph: unknown kind of operand");
}

}  // namespace

void ReplaySteps::run_node(const Step& step, std::vector<at::Tensor>& slots, Stack& stack) const {
  stack.clear();
  for (const SlotOperand& argument : step.arguments) stack.push_back(argument_of(argument, slots));
  if (step.reshapes) {
    // The strides among its arguments are those of the recorded layout; what was sent may have another one.
    const at::Tensor reshaped = stack[0].toTensor().reshape(stack[1].toIntVector());
    stack.clear();
    stack.emplace_back(reshaped);
  } else {
    step.op->callBoxed(&stack);
  }
  for (std::size_t i = 0; i < step.results.size(); ++i) {
    const SlotOperand& result = step.results[i];
    if (result.kind == Operand::Kind::Tensor) {
      if (result.slots[0] != kNoSlot) slots[static_cast<std::size_t>(result.slots[0])] = stack[i].toTensor();
    } else if (result.kind != Operand::Kind::Constant) {
      const auto list = stack[i].toTensorVector();
      for (std::size_t j = 0; j < result.slots.size(); ++j)
        if (result.slots[j] != kNoSlot) slots[static_cast<std::size_t>(result.slots[j])] = list.at(j);
    }
  }
}

std::vector<c10::IValue> ReplaySteps::run(std::vector<at::Tensor> given) const {
  PENSTOCK_INVARIANT(given.size() == inputs.size(), "a replay takes one tensor for each of its inputs");
  // Casts were recorded.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  std::vector<at::Tensor> tensors(slots);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i] != kNoSlot) tensors[static_cast<std::size_t>(inputs[i])] = std::move(given[i]);
  given.clear();
  for (const auto& [slot, tensor] : constants) tensors[static_cast<std::size_t>(slot)] = tensor;
  Stack stack;
  for (const Step& step : steps) {
    if (step.function) {
      give_history(step.function, tensors);
    } else if (step.grad_enabled || any_grad_mode) {
      run_node(step, tensors, stack);
    } else {
      const at::NoGradGuard no_grad;
      run_node(step, tensors, stack);
    }
    for (const Slot slot : step.released) tensors[static_cast<std::size_t>(slot)].reset();
  }
  std::vector<c10::IValue> results;
  for (const SlotOperand& output : outputs) results.push_back(argument_of(output, tensors));
  return results;
}

NodeReplay::NodeReplay(const ForwardTrace& trace, const ReplayPart& part) {
  StepMaker maker(trace.graph, part.recorded_on, part.device);
  auto steps = std::make_shared<ReplaySteps>();
  steps->inputs = maker.slots_of(part.inputs);
  auto function = part.functions.begin();
  const auto histories_before = [&](std::size_t node) {
    for (; function != part.functions.end() && trace.functions[*function].end <= node; ++function) {
      ReplaySteps::Step step;
      step.function = maker.function(trace.functions[*function]);
      steps->steps.push_back(std::move(step));
    }
  };
  for (std::size_t i = part.first; i < part.end; ++i) {
    histories_before(i);
    steps->steps.push_back(maker.step(trace.graph.nodes[i]));
  }
  histories_before(part.end);
  for (const Operand& output : part.outputs) steps->outputs.push_back(maker.operand(output));
  maker.finish(*steps);
  steps_ = std::move(steps);
}

NodeReplay::~NodeReplay() = default;
NodeReplay::NodeReplay(NodeReplay&&) noexcept = default;
NodeReplay& NodeReplay::operator=(NodeReplay&&) noexcept = default;

std::vector<c10::IValue> NodeReplay::run(std::vector<at::Tensor> inputs) const {
  return steps_->run(std::move(inputs));
}

}  // namespace penstock::graph
