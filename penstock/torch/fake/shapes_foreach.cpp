// Operators over lists of tensors (optimizers use them), and operators that only write.
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

#include "penstock/errors.h"
#include "penstock/operator_traits.h"
#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

// "aten::_foreach_add.List" does for every tensor what "aten::add.Tensor" does for one.
c10::optional<c10::OperatorHandle> operator_for_one(const c10::OperatorHandle& op) {
  static constexpr std::string_view kPrefix = "aten::_foreach_";
  const std::string name = "aten::" + op.operator_name().name.substr(kPrefix.size());
  const std::string& overload = op.operator_name().overload_name;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (overload == "List" || overload == "Tensor")
    if (const auto found = dispatcher.findSchema({name, "Tensor"})) return found;
  if (overload == "Scalar" || overload == "ScalarList")
    if (const auto found = dispatcher.findSchema({name, "Scalar"})) return found;
  return dispatcher.findSchema({name, ""});
}

void for_each(const c10::OperatorHandle& op, Stack* stack) {
  const auto one = operator_for_one(op);
  if (!one)
    throw NotImplemented(
        c10::toString(op.operator_name()) +
        ": no matching operator for a single tensor; call the single-tensor operator in a loop");
  const std::size_t count = op.schema().arguments().size(), base = stack->size() - count;
  const c10::List<Tensor> self = (*stack)[base].toTensorList();
  c10::List<Tensor> results;
  for (std::size_t i = 0; i < self.size(); ++i) {
    Stack single;
    for (std::size_t j = 0; j < one->schema().arguments().size(); ++j) {
      if (j >= count)
        single.push_back(one->schema().arguments()[j].default_value().value());
      else if (const c10::IValue& value = (*stack)[base + j]; value.isList())
        single.push_back(value.toListRef()[i]);
      else
        single.push_back(value);
    }
    // callBoxed would not use its own shape function, if it has one, so look up the rule.
    call_shape_only(*one, &single);
    results.push_back(single.back().toTensor());
  }
  stack->resize(base);
  stack->emplace_back(std::move(results));
}

}  // namespace

void write_only(const c10::OperatorHandle& op, Stack* stack) {
  stack->resize(stack->size() - op.schema().arguments().size());
}

void add_foreach_shapes() {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0 || name.name.back() == '_') continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op && op->schema().returns().size() == 1) register_boxed<for_each>(c10::toString(name));
  }
  for (const char* op : {"aten::_assert_async", "aten::_assert_async.msg"}) register_boxed<write_only>(op);
}

}  // namespace penstock::detail
