#include "penstock/torch/fake/shape_functions.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>

#include "penstock/operator_traits.h"
#include "penstock/torch/fake/fake_payload.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

bool is_output(const OperatorTraits& traits, const c10::FunctionSchema& schema, std::size_t argument) {
  return traits.arguments[argument].written && schema.arguments()[argument].is_out();
}

// Returns whether `functional` takes the arguments of `schema` without its outputs.
bool matches(const c10::FunctionSchema& functional, const std::vector<const c10::Argument*>& inputs,
             std::size_t results) {
  if (functional.arguments().size() != inputs.size() || functional.returns().size() != results) return false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const c10::Argument& argument = functional.arguments()[i];
    if (argument.name() != inputs[i]->name() || *argument.type() != *inputs[i]->type()) return false;
    if (argument.alias_info() && argument.alias_info()->isWrite()) return false;
  }
  return true;
}

}  // namespace

c10::optional<c10::OperatorHandle> functional_overload(const c10::OperatorHandle& op) {
  const OperatorTraits& traits = traits_of(op);
  if (!traits.mutates) return c10::nullopt;
  const c10::FunctionSchema& schema = op.schema();
  std::vector<const c10::Argument*> inputs;
  for (std::size_t i = 0; i < traits.arguments.size(); ++i)
    if (!is_output(traits, schema, i)) inputs.push_back(&schema.arguments()[i]);
  std::string name = op.operator_name().name;
  std::string overload = op.operator_name().overload_name;
  if (inputs.size() == schema.arguments().size()) {  // in place: add_ and add
    if (name.back() != '_') return c10::nullopt;
    name.pop_back();
  } else {  // Tensor_out and Tensor; out, output, grad_input ... and no overload name
    const auto suffix = overload.rfind("_out");
    overload = suffix != std::string::npos && suffix + 4 == overload.size() ? overload.substr(0, suffix) : "";
  }
  for (const std::string& candidate : {overload, std::string("dim"), std::string("output_mask")}) {
    const auto found = c10::Dispatcher::singleton().findSchema({name, candidate});
    if (found && matches(found->schema(), inputs, schema.returns().size())) return found;
  }
  return c10::nullopt;
}

void call_shape_only(const c10::OperatorHandle& op, Stack* stack) {
  const FakeRule& rule = fake_rule(op);
  if (rule.kind == FakeRule::Kind::Shape)
    rule.shape->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  else
    op.callBoxed(stack);
}

void shape_of_functional(const c10::OperatorHandle& op, Stack* stack) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, c10::OperatorHandle> known;
  auto functional = known.find(&op.schema());
  if (functional == known.end())
    functional = known.emplace(&op.schema(), functional_overload(op).value()).first;
  const OperatorTraits& traits = traits_of(op);
  const std::size_t base = stack->size() - traits.arguments.size();
  Stack inner;
  bool in_place = true;
  for (std::size_t i = 0; i < traits.arguments.size(); ++i) {
    if (is_output(traits, op.schema(), i))
      in_place = false;
    else
      inner.push_back((*stack)[base + i]);
  }
  call_shape_only(functional->second, &inner);
  Stack results;
  for (std::size_t i = 0; i < traits.returns.size(); ++i) {
    const Tensor written = (*stack)[base + static_cast<std::size_t>(traits.returns[i].argument)].toTensor();
    const Tensor& result = inner[i].toTensor();
    if (result.defined() && written.sizes() != result.sizes()) {
      TORCH_CHECK(!in_place, "output with shape ", written.sizes(), " doesn't match the broadcast shape ",
                  result.sizes());
      written.resize_(result.sizes());
      written.as_strided_(result.sizes(), result.strides());
    }
    results.emplace_back(written);
  }
  stack->resize(base);
  stack->insert(stack->end(), results.begin(), results.end());
}

void add_own_shape_functions() {
  add_attention_shapes();
  add_convolution_shapes();
  add_embedding_shapes();
  add_foreach_shapes();
  add_loss_shapes();
  add_normalization_shapes();
  add_pointwise_shapes();
  add_pooling_shapes();
  add_random_shapes();
  add_reduction_shapes();
  add_vendor_shapes();
}

}  // namespace penstock::detail
