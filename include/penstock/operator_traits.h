// Facts about an operator that handlers need on every call, derived from its schema once and cached.
//
//   const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor");
//   const OperatorTraits& traits = traits_of(op);
//   bool in_place = traits.returns[0].kind == ReturnAlias::Kind::Same;   // true: the result is argument 0
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <optional>

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// ---- arguments on the stack ----
//
// Visits the tensors inside an argument of an operator: a tensor, a list of tensors, a list of optional
// tensors.
//
//   c10::IValue value(std::vector<at::Tensor>{x, y});
//   std::int64_t elements = 0;
//   for_each_tensor(value, [&](const at::Tensor& tensor) { elements += tensor.numel(); });
//   c10::IValue doubled = map_tensors(value, [](const at::Tensor& tensor) { return tensor * 2; });
//
// Thread safety: as for the values visited.

// The stack that boxed operators take their arguments from and push their results onto.
using Stack = torch::jit::Stack;

// Calls `visit(const at::Tensor&)` for every defined tensor in `value`.
template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (const at::Tensor& tensor = value.toTensor(); tensor.defined()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef())
      if (element.isTensor() && element.toTensor().defined()) visit(element.toTensor());
  }
}

// Returns `value` with every defined tensor replaced by `map(const at::Tensor&)`. Values without tensors are
// returned unchanged.
template <class Map>
c10::IValue map_tensors(const c10::IValue& value, Map&& map) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(map(tensor)) : value;
  }
  if (value.isTensorList()) {
    const c10::ArrayRef<c10::IValue> list = value.toListRef();
    c10::List<at::Tensor> mapped;
    mapped.reserve(list.size());
    for (const c10::IValue& element : list) {
      const at::Tensor& tensor = element.toTensor();
      mapped.push_back(tensor.defined() ? at::Tensor(map(tensor)) : tensor);
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<c10::optional<at::Tensor>> mapped;
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined())
        mapped.push_back(c10::optional<at::Tensor>(map(element.toTensor())));
      else
        mapped.push_back(c10::nullopt);
    }
    return mapped;
  }
  return value;
}

// Where a result of an operator comes from.
struct ReturnAlias {
  // How the result is related to the arguments.
  enum class Kind : std::uint8_t {
    Fresh,  // new memory
    View,   // other metadata for the memory of argument `argument`
    Same    // argument `argument` itself, written in place
  };
  Kind kind = Kind::Fresh;  // how it is related
  int argument = -1;        // index of the argument for View and Same, else -1
  // Whether the schema says so. `_unsafe_view` and `lift` return the memory of their argument, but are
  // declared to return new memory: autograd and version counters do not relate the two tensors.
  bool declared = true;
};

// Facts about one argument.
struct ArgumentTraits {
  // The declared type, optional or not.
  enum class Kind : std::uint8_t {
    Other,              // contains no tensors
    Tensor,             // Tensor
    TensorList,         // Tensor[]
    OptionalTensorList  // Tensor?[]
  };
  Kind kind = Kind::Other;  // the declared type
  bool written = false;     // whether the operator writes to it
};

// Facts about an operator.
struct OperatorTraits {
  // Derives the facts from the schema. Use traits_of, which caches them.
  explicit OperatorTraits(const c10::OperatorHandle& op);

  std::string name;                       // "aten::add.Tensor"
  std::vector<ArgumentTraits> arguments;  // one per argument of the schema
  std::vector<ReturnAlias> returns;       // one per result of the schema
  bool composite = false;                 // decomposed into other operators, which autograd sees instead
  bool mutates = false;                   // writes to at least one argument
  bool any_alias = false;                 // some result is Same or View
  bool pure_view = false;                 // every result is declared a View, and nothing is written
  int device_argument = -1;               // index of the argument named `device`, or -1
  int pin_memory_argument = -1;           // index of the argument named `pin_memory`, or -1
};

// Returns the facts about an operator. The reference is valid until the process ends.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

// Returns a small integer for an operator, numbered from 0 in the order of first use, as an index into
// tables.
std::size_t operator_index(const c10::OperatorHandle& op);

}  // namespace penstock
