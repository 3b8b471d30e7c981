#include "penstock/graph/call_guard.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <sstream>

namespace penstock::graph {
namespace {

std::string text_of(const c10::IValue& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

std::vector<CallGuard::Input> CallGuard::describe_all(const Values& inputs) {
  std::vector<Input> all;
  all.reserve(inputs.size());
  const auto is_tensor = [](const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); };
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Input input;
    input.same_as = input.shares_with = i;
    if (!is_tensor(inputs[i])) {
      input.value = inputs[i];
    } else {
      const at::Tensor& tensor = inputs[i].toTensor();
      input.tensor = geometry_of(tensor);
      input.requires_grad = tensor.requires_grad();
      input.is_leaf = tensor.is_leaf();
      for (std::size_t j = 0; j < i; ++j) {
        if (!is_tensor(inputs[j])) continue;
        const at::Tensor& other = inputs[j].toTensor();
        if (input.same_as == i && other.is_same(tensor)) input.same_as = j;
        if (input.shares_with == i && other.is_alias_of(tensor)) input.shares_with = all[j].shares_with;
      }
      // Only inputs that share memory may be merged, and how depends on what they are views of.
      input.is_view = input.shares_with != i && tensor.is_view();
    }
    all.push_back(std::move(input));
  }
  return all;
}

CallGuard::CallGuard(const Values& inputs) : inputs_(describe_all(inputs)), grad_mode_(c10::GradMode::is_enabled()) {}

std::string CallGuard::difference(const Values& inputs) const {
  if (inputs.size() != inputs_.size()) return fmt::format("{} inputs, the capture {}", inputs.size(), inputs_.size());
  if (c10::GradMode::is_enabled() != grad_mode_) return fmt::format("grad mode is {}, in the capture {}", !grad_mode_, grad_mode_);
  const std::vector<Input> now = describe_all(inputs);
  for (std::size_t i = 0; i < now.size(); ++i) {
    const Input &actual = now[i], &expected = inputs_[i];
    const std::string who = fmt::format("input {}", i);
    if (actual.tensor.has_value() != expected.tensor.has_value())
      return fmt::format("{} is {}a tensor, in the capture {}", who, actual.tensor ? "" : "not ", expected.tensor ? "it is" : "it is not");
    if (!actual.tensor) {
      const bool same = actual.value.tagKind() == expected.value.tagKind() && text_of(actual.value) == text_of(expected.value);
      if (!same) return fmt::format("{} is {}, in the capture {}", who, text_of(actual.value), text_of(expected.value));
      continue;
    }
    const Geometry &is = *actual.tensor, &was = *expected.tensor;
    if (is.sizes != was.sizes) return fmt::format("{} has sizes [{}], in the capture [{}]", who, fmt::join(is.sizes, ", "), fmt::join(was.sizes, ", "));
    if (is.strides != was.strides)
      return fmt::format("{} has strides [{}], in the capture [{}]", who, fmt::join(is.strides, ", "), fmt::join(was.strides, ", "));
    if (is.storage_offset != was.storage_offset)
      return fmt::format("{} begins at element {} of its memory, in the capture {}", who, is.storage_offset, was.storage_offset);
    if (is.dtype != was.dtype) return fmt::format("{} is of dtype {}, in the capture {}", who, c10::toString(is.dtype), c10::toString(was.dtype));
    if (is.device != was.device) return fmt::format("{} is on {}, in the capture {}", who, is.device.str(), was.device.str());
    if (actual.requires_grad != expected.requires_grad)
      return fmt::format("{} {} a gradient, in the capture it {}", who, actual.requires_grad ? "needs" : "needs no",
                         expected.requires_grad ? "does" : "does not");
    if (actual.is_leaf != expected.is_leaf) return fmt::format("{} is {}a leaf, in the capture {}", who, actual.is_leaf ? "" : "not ", expected.is_leaf);
    if (actual.same_as != expected.same_as || actual.shares_with != expected.shares_with || actual.is_view != expected.is_view)
      return fmt::format("{} shares memory with other inputs than in the capture", who);
  }
  return {};
}

}  // namespace penstock::graph
