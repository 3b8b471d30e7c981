#include "penstock/base/describe.h"
#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {
namespace {

template <class Element>
c10::IValue list_of(std::span<const Slot> slots, const Frame& frame) {
  c10::List<Element> list;
  list.reserve(slots.size());
  for (const Slot slot : slots) {
    const at::Tensor& tensor = frame.slots[slot];
    list.push_back(tensor.defined() ? Element(tensor) : Element());
  }
  return list;
}

void push(const Argument& argument, Frame& frame) {
  switch (argument.kind) {
    case Argument::Kind::Constant:
      frame.stack.push_back(*static_cast<const c10::IValue*>(argument.constant));
      break;
    case Argument::Kind::Symbolic:
      frame.stack.push_back(frame.sizes->constants[argument.slot]);
      break;
    case Argument::Kind::Tensor:
      if (argument.last_use)
        frame.stack.emplace_back(std::move(frame.slots[argument.slot]));
      else
        frame.stack.emplace_back(frame.slots[argument.slot]);
      break;
    case Argument::Kind::List:
      frame.stack.push_back(list_of<at::Tensor>(frame.plan->lists[argument.slot], frame));
      break;
    case Argument::Kind::OptionalList:
      frame.stack.push_back(list_of<c10::optional<at::Tensor>>(frame.plan->lists[argument.slot], frame));
      break;
  }
}

}  // namespace

void call_boxed(const Step& step, Frame& frame) {
  for (const Argument& argument : step.arguments) push(argument, frame);
  step.op.callBoxed(&frame.stack);
  for (std::size_t i = 0; i < step.results.size(); ++i) {
    const Result& result = step.results[i];
    if (result.kind == Result::Kind::Tensor) {
      frame.slots[result.slot] = std::move(frame.stack[i]).toTensor();
    } else if (result.kind == Result::Kind::List) {
      const std::span<const Slot> slots = frame.plan->lists[result.slot];
      const c10::ArrayRef<c10::IValue> list = frame.stack[i].toListRef();
      PENSTOCK_INVARIANT(list.size() == slots.size(),
                         "an operator returned a list of a different length than recorded");
      for (std::size_t j = 0; j < slots.size(); ++j)
        if (slots[j] != kNoSlot) frame.slots[slots[j]] = list[j].toTensor();
    }
  }
  frame.stack.clear();
}

}  // namespace penstock::graph
