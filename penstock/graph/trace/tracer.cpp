#include "penstock/graph/trace/tracer.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/ir/subclass_record.h"

namespace penstock::graph {
namespace {

// The identity of a tensor: for a wrapper its payload, which its copies share.
const void* identity_of(const at::Tensor& tensor) {
  if (const Payload* payload = payload_of(tensor)) return payload;
  return tensor.unsafeGetTensorImpl();
}

bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() && !is_wrapper(tensor);
}

bool any_wrapper_in(c10::ArrayRef<c10::IValue> values) {
  bool any = false;
  for (const c10::IValue& value : values)
    if (value.isTensor() || value.isList())
      for_each_tensor(value, [&](const at::Tensor& tensor) { any |= is_wrapper(tensor); });
  return any;
}

}  // namespace

at::Tensor Tracer::add_input(at::Tensor fake, std::string name) {
  const FakeNote* note = fake_note(fake);
  if (!note || note->owner == note_owner_)
    throw TypeError(
        fmt::format("graph: input '{}' is {}, expected a new fake tensor; create one with to_fake", name,
                    note ? "already another value" : "a real tensor"));
  graph.inputs.push_back({define(fake, new_storage(fake)), std::move(name)});
  return fake;
}

StorageId Tracer::new_storage(const at::Tensor& tensor) {
  storage_address_.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  return graph.new_storage();
}

StorageId Tracer::storage_of(const at::Tensor& tensor) { return graph[value_of(tensor)].storage; }

// The memory of one of the arguments or of an earlier result of the same node, or new memory.
StorageId Tracer::storage_of_result(const at::Tensor& tensor, const Node& node) {
  const c10::StorageImpl* address = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  for (const Operand& argument : node.arguments)
    for (const ValueId value : argument.values)
      if (value != kNoValue && storage_address_[index_of(graph[value].storage)] == address)
        return graph[value].storage;
  for (std::size_t i = first_result_; i < graph.values.size(); ++i)
    if (const StorageId storage = graph.values[i].storage; storage_address_[index_of(storage)] == address)
      return storage;
  return new_storage(tensor);
}

ValueId Tracer::define(const at::Tensor& tensor, StorageId storage) {
  const ValueId value = graph.new_value(geometry_of(tensor), storage);
  if (seen) [[unlikely]]
    seen(tensor, value);
  if (FakeNote* note = fake_note(tensor)) [[likely]] {
    *note = {note_owner_, static_cast<std::int32_t>(value)};
    return value;
  }
  const auto [entry, is_new] = others_.insert_or_assign(identity_of(tensor), value);
  if (is_new) {
    if (Payload* payload = payload_of(tensor))
      held_payloads_.push_back(PayloadPtr::reclaim_copy(payload));
    else
      held_tensors_.push_back(tensor);
  }
  return value;
}

ValueId Tracer::value_of(const at::Tensor& tensor) {
  if (const FakeNote* note = fake_note(tensor)) [[likely]] {
    if (note->owner == note_owner_) {
      const ValueId value{note->value};
      if (seen) [[unlikely]]
        return seen(tensor, value);
      return value;
    }
  } else if (const auto known = others_.find(identity_of(tensor)); known != others_.end()) {
    return known->second;
  }
  if (is_wrapper(tensor))
    throw StateError(
        fmt::format("graph: the captured function uses a tensor of kind {} from outside; pass it as an input",
                    payload_of(tensor)->kind()));
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto [entry, is_new] = storages_of_others_.try_emplace(storage.unsafeGetStorageImpl());
  if (is_new) {
    entry->second = new_storage(tensor);
    held_storages_.push_back(storage);
  }
  const ValueId value = define(tensor, entry->second);
  graph.constants.push_back({value, tensor.detach()});
  return value;
}

Operand Tracer::operand_of(const c10::IValue& value) {
  if (!value.isTensor()) return Operand::of(value);
  return value.toTensor().defined() ? Operand::of(value_of(value.toTensor())) : Operand::of(kNoValue);
}

// A tensor that autograd would differentiate must be an input: the gradient of a constant would be lost.
void Tracer::check_constant(const at::Tensor& tensor) const {
  if (is_wrapper(tensor) || !tensor.requires_grad() || phase == Phase::Backward ||
      !c10::GradMode::is_enabled())
    return;
  throw StateError(
      fmt::format("graph: the captured function uses a tensor of sizes [{}] that requires a gradient and is "
                  "not one of its inputs; pass it "
                  "as an input, or register it as a parameter of the module",
                  fmt::join(tensor.sizes(), ", ")));
}

// The same for a subclass around real tensors, which become constants individually.
void Tracer::check_subclass_constant(const at::Tensor& tensor) const {
  if (!is_subclass(tensor) || !tensor.requires_grad() || phase == Phase::Backward ||
      !c10::GradMode::is_enabled())
    return;
  for (const at::Tensor& part : plain_parts(tensor))
    if (is_fake(part)) return;
  throw StateError(
      fmt::format("graph: the captured function uses a tensor of kind {} and sizes [{}] that requires a "
                  "gradient and is not one of its inputs; pass it "
                  "as an input, or register it as a parameter of the module",
                  type_text(tensor), fmt::join(tensor.sizes(), ", ")));
}

Operand Tracer::argument_of(ArgumentTraits::Kind kind, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) check_constant(tensor);
    return !tensor.defined() || is_number(tensor) ? Operand::of(value) : Operand::of(value_of(tensor));
  }
  if ((kind != ArgumentTraits::Kind::TensorList && kind != ArgumentTraits::Kind::OptionalTensorList) ||
      !value.isList())
    return Operand::of(value);
  Operand operand;
  operand.kind = kind == ArgumentTraits::Kind::TensorList ? Operand::Kind::TensorList
                                                          : Operand::Kind::OptionalTensorList;
  for (const c10::IValue& element : value.toListRef()) {
    const bool given = element.isTensor() && element.toTensor().defined();
    if (given) check_constant(element.toTensor());
    operand.values.push_back(given ? value_of(element.toTensor()) : kNoValue);
  }
  return operand;
}

// The value of a written argument: a new one if the write changed its geometry.
ValueId Tracer::rewritten(const at::Tensor& tensor) {
  const ValueId value = value_of(tensor);
  return has_geometry(tensor, graph[value].geometry) ? value : define(tensor, graph[value].storage);
}

Operand Tracer::record_result(const ReturnAlias& alias, const c10::IValue& value, const Node& node) {
  const auto record = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return kNoValue;
    return alias.kind == ReturnAlias::Kind::Same ? rewritten(tensor)
                                                 : define(tensor, storage_of_result(tensor, node));
  };
  if (value.isTensor()) return Operand::of(record(value.toTensor()));
  if (!value.isTensorList()) return Operand::of(c10::IValue());
  Operand operand;
  operand.kind = Operand::Kind::TensorList;
  for (const c10::IValue& element : value.toListRef()) operand.values.push_back(record(element.toTensor()));
  return operand;
}

// If only fake tensors are involved, the dispatcher is bypassed.
void Tracer::run_below(const c10::OperatorHandle& op, Stack* stack) {
  Mode* below = current_mode();
  if (below && typeid(*below) == typeid(FakeMode)) [[likely]]
    static_cast<FakeMode*>(below)->dispatch(op, stack);
  else
    op.callBoxed(stack);
}

// The tensors among the arguments of a call.
struct Tracer::Arguments {
  explicit Arguments(c10::ArrayRef<c10::IValue> arguments) {
    for (const c10::IValue& argument : arguments) {
      if (argument.isTensor())
        add(argument.toTensor());
      else if (argument.isList())
        for_each_tensor(argument, [&](const at::Tensor& tensor) { add(tensor); });
    }
  }
  void add(const at::Tensor& tensor) {
    kept.push_back(tensor);
    Payload* payload = payload_of(tensor);
    if (!payload) return;
    any_wrapper = true;
    if (!is_fake(tensor) && (!subclass || payload->priority() > subclass->priority())) subclass = payload;
  }

  c10::SmallVector<at::Tensor, 6> kept;
  bool any_wrapper = false;
  // One that is not fake handles its operators itself, and the operators it calls are recorded instead.
  Payload* subclass = nullptr;
};

void Tracer::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  const std::size_t base = stack->size() - traits.arguments.size();
  Node node{op, {}, {}, phase, c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()};
  const auto read_arguments = [&](c10::ArrayRef<c10::IValue> arguments) {
    node.arguments.reserve(arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i)
      node.arguments.push_back(argument_of(traits.arguments[i].kind, arguments[i]));
  };
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + base, traits.arguments.size());
  // Keeps the arguments alive while the operator runs, so that no result reuses an argument's address.
  const Arguments tensors(arguments);
  if (tensors.subclass) [[unlikely]] {
    for (const at::Tensor& tensor : tensors.kept) check_subclass_constant(tensor);
    const PayloadPtr keep = PayloadPtr::reclaim_copy(tensors.subclass);
    const ModeGuard again(*this);
    return keep->dispatch(op, stack);
  }
  if (traits.mutates && rebind(op, stack, base)) return;
  if (decompositions && tensors.any_wrapper) [[unlikely]]
    if (const Decomposition* decomposition = decompositions->find(op);
        decomposition &&
        std::find(expanding_.begin(), expanding_.end(), op.operator_name()) == expanding_.end())
      return expand(op, *decomposition, stack, base);
  if (traits.mutates || tensors.any_wrapper) [[likely]] {
    read_arguments(arguments);
    try {
      run_below(op, stack);
    } catch (const DataDependentError& error) {
      throw DataDependentError(fmt::format("graph: {}; {}", error.what(), origin_of_values(node)));
    }
  } else {
    // A factory, or an operator on constants; only the result shows which.
    const std::vector<c10::IValue> kept = arguments.vec();
    run_below(op, stack);
    if (!any_wrapper_in(c10::ArrayRef<c10::IValue>(stack->data() + base, traits.returns.size()))) return;
    read_arguments(kept);
  }
  node.results.reserve(traits.returns.size());
  first_result_ = graph.values.size();
  for (std::size_t i = 0; i < traits.returns.size(); ++i)
    node.results.push_back(record_result(traits.returns[i], (*stack)[base + i], node));
  graph.nodes.push_back(std::move(node));
}

}  // namespace penstock::graph
