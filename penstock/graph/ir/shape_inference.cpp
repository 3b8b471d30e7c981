#include "penstock/graph/ir/shape_inference.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "penstock/fake.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {

Stack run_on_fake_arguments(const Graph& graph, const c10::OperatorHandle& op,
                            const std::vector<Operand>& arguments) {
  const auto fake = [&](ValueId value) {
    const Geometry& geometry = graph[value].geometry;
    at::Tensor made = make_fake_strided(geometry.sizes, geometry.strides,
                                        at::dtype(geometry.dtype).device(geometry.device));
    if (geometry.conjugated) made = made.conj();
    return geometry.negated ? made._neg_view() : made;
  };
  Stack stack;
  for (const Operand& operand : arguments) switch (operand.kind) {
      case Operand::Kind::Constant:
        stack.push_back(operand.constant);
        break;
      case Operand::Kind::Tensor:
        stack.emplace_back(operand.values[0] == kNoValue ? at::Tensor() : fake(operand.values[0]));
        break;
      case Operand::Kind::TensorList: {
        c10::List<at::Tensor> list;
        for (const ValueId value : operand.values)
          list.push_back(value == kNoValue ? at::Tensor() : fake(value));
        stack.emplace_back(std::move(list));
        break;
      }
      case Operand::Kind::OptionalTensorList: {
        c10::List<c10::optional<at::Tensor>> list;
        for (const ValueId value : operand.values)
          list.push_back(value == kNoValue ? c10::optional<at::Tensor>()
                                           : c10::optional<at::Tensor>(fake(value)));
        stack.emplace_back(std::move(list));
        break;
      }
    }
  const at::AutoDispatchBelowADInplaceOrView below;
  FakeMode mode;
  const ModeGuard guard(mode);
  op.callBoxed(&stack);
  return stack;
}

std::vector<Operand> infer_results(Graph& graph, const Node& node) {
  const OperatorTraits& traits = traits_of(node.op);
  const Stack shapes = run_on_fake_arguments(graph, node.op, node.arguments);
  std::vector<Operand> results;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    StorageId storage = {};
    bool is_view = false;
    if (traits.returns[i].kind == ReturnAlias::Kind::View) {
      const ValueId viewed = node.arguments[static_cast<std::size_t>(traits.returns[i].argument)].value();
      if (viewed != kNoValue) {
        storage = graph[viewed].storage;
        is_view = true;
      }
    }
    const auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return kNoValue;
      return is_view ? graph.new_value(geometry_of(tensor), storage) : graph.new_value(geometry_of(tensor));
    };
    if (shapes[i].isTensor()) {
      results.push_back(Operand::of(add(shapes[i].toTensor())));
    } else if (shapes[i].isTensorList()) {
      Operand list;
      list.kind = Operand::Kind::TensorList;
      for (const c10::IValue& element : shapes[i].toListRef()) list.values.push_back(add(element.toTensor()));
      results.push_back(std::move(list));
    } else {
      results.push_back(Operand::of(c10::IValue()));
    }
  }
  return results;
}

}  // namespace penstock::graph
