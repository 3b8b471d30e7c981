#include "penstock/graph/compiler/execute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/direct_kernel.h"
#include "penstock/graph/compiler/planner.h"
#include "penstock/mode.h"

namespace penstock::graph {

Executor::Executor(const Graph& graph, const ExecutorOptions& options) {
  verify(graph);
  needs_sizes_ = graph.table && !(graph.table->constants.empty() && graph.table->tensors.empty());
  const LastUses last_uses(graph);
  plan_ = plan_run(graph, last_uses, options, counts_);
  inputs_.reserve(graph.inputs.size());
  for (const Placeholder& input : graph.inputs)
    inputs_.push_back(
        {static_cast<Slot>(index_of(input.value)), last_uses.of(input.value) == LastUses::kNever});
  for (const ConstantTensor& constant : graph.constants)
    constants_.push_back({static_cast<Slot>(index_of(constant.value)), constant.tensor, constant.symbolic});
  std::vector<char> later(graph.values.size(), 0);
  // A constant stays in its slot.
  for (const ConstantTensor& constant : graph.constants) later[index_of(constant.value)] = 1;
  outputs_.resize(graph.outputs.size());
  for (std::size_t i = graph.outputs.size(); i-- > 0;) {
    const Operand& output = graph.outputs[i];
    outputs_[i].constant = output.constant;
    outputs_[i].symbolic = output.symbolic;
    outputs_[i].is_tensor = output.kind != Operand::Kind::Constant;
    if (!outputs_[i].is_tensor) continue;
    const ValueId value = output.values[0];
    outputs_[i].slot = value == kNoValue ? plan_->undefined_slot() : static_cast<Slot>(index_of(value));
    if (value != kNoValue) outputs_[i].last = !std::exchange(later[index_of(value)], 1);
  }
}

Executor::~Executor() = default;

std::unique_ptr<Frame> Executor::take_frame() const {
  {
    const std::lock_guard lock(mutex_);
    if (!frames_.empty()) {
      std::unique_ptr<Frame> frame = std::move(frames_.back());
      frames_.pop_back();
      return frame;
    }
  }
  auto frame = std::make_unique<Frame>(*plan_);
  for (const Constant& constant : constants_)
    if (constant.symbolic == kNotSymbolic) frame->slots[constant.slot] = constant.tensor;
  return frame;
}

void Executor::call_steps(Frame& frame) const {
  const c10::AutoGradMode grad_mode(c10::GradMode::is_enabled());  // restored at the end
  bool grad_enabled = c10::GradMode::is_enabled();
  for (const Step& step : plan_->steps) {
    if (step.grad_enabled != grad_enabled) c10::GradMode::set_enabled(grad_enabled = step.grad_enabled);
    step.call(step, frame);
    for (const Slot slot : step.frees) free_slot(frame, slot);
  }
}

std::vector<c10::IValue> Executor::take_results(Frame& frame) const {
  std::vector<c10::IValue> results;
  results.reserve(outputs_.size());
  for (const Output& output : outputs_) {
    if (!output.is_tensor) {
      results.push_back(output.symbolic == kNotSymbolic
                            ? output.constant
                            : frame.sizes->constants[static_cast<std::size_t>(output.symbolic)]);
    } else if (output.last) {
      results.emplace_back(std::move(frame.slots[output.slot]));
    } else {
      results.emplace_back(frame.slots[output.slot]);
    }
  }
  return results;
}

std::vector<c10::IValue> Executor::operator()(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const {
  if (inputs.size() != inputs_.size())
    throw ValueError(describe("graph: number of inputs", std::to_string(inputs.size()),
                              std::to_string(inputs_.size()), "pass one tensor for each input of the graph"));
  if (needs_sizes_ && !sizes)
    throw ValueError(
        "graph: the graph has symbols, but no sizes were passed; pass the result of graph.table->at() for "
        "the sizes of this run");
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!inputs[i].defined())
      throw ValueError(
          fmt::format("graph: input {} is undefined, expected a tensor; pass every input of the graph", i));
  const at::AutoDispatchBelowADInplaceOrView below;
  // Casts that apply were recorded as nodes.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  // A frame of a run that throws is destroyed with its tensors.
  std::unique_ptr<Frame> frame = take_frame();
  frame->sizes = sizes;
  if (sizes && sizes->values != frame->size_values) {
    forget_views(*frame);
    frame->size_values = sizes->values;
  }
  frame->unobserved = current_mode() == nullptr;
  frame->direct_kernels = frame->unobserved && direct_kernels_allowed();
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!inputs_[i].unused) frame->slots[inputs_[i].slot] = std::move(inputs[i]);
  for (const Constant& constant : constants_)
    if (constant.symbolic != kNotSymbolic)
      frame->slots[constant.slot] = sizes->tensors[static_cast<std::size_t>(constant.symbolic)];
  call_steps(*frame);
  std::vector<c10::IValue> results = take_results(*frame);
  const std::lock_guard lock(mutex_);
  frames_.push_back(std::move(frame));
  return results;
}

}  // namespace penstock::graph
