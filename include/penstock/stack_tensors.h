// Visits the tensors inside an argument of an operator: a tensor, a list of tensors, a list of optional
// tensors.
//
//   c10::IValue value(std::vector<at::Tensor>{x, y});
//   std::int64_t elements = 0;
//   for_each_tensor(value, [&](const at::Tensor& tensor) { elements += tensor.numel(); });
//   c10::IValue doubled = map_tensors(value, [](const at::Tensor& tensor) { return tensor * 2; });
//
// Thread safety: as for the values visited.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>

namespace penstock {

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

}  // namespace penstock
