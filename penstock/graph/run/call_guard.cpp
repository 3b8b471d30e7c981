#include "penstock/graph/run/call_guard.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "penstock/graph/ir/constant_value.h"

namespace penstock::graph {
namespace {

std::string text_of(const c10::IValue& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

const c10::StorageImpl* storage_behind(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_storage()
             ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
             : nullptr;
}

bool has_layout(const at::Tensor& tensor, const LayoutInCall& layout) {
  return tensor.sizes() == layout.sizes && tensor.strides() == layout.strides &&
         tensor.storage_offset() == layout.storage_offset;
}

// "sizes [5, 4], in the capture [B, 4] with B = 3: dim 0 differs"
std::string sizes_text(at::IntArrayRef is, const Geometry& was, at::IntArrayRef expected,
                       const BoundSizes* sizes, const SymbolicTable* table) {
  std::string text =
      fmt::format("sizes [{}], in the capture [{}]", fmt::join(is, ", "), layout_text(was, table).sizes);
  if (was.symbolic == kNotSymbolic || !sizes || !table) return text;
  text += " with " + table->text_of(sizes->values);
  for (std::size_t dim = 0; dim < expected.size() && dim < is.size(); ++dim)
    if (is[dim] != expected[dim]) return text + fmt::format(": dim {} differs", dim);
  return text;
}

}  // namespace

std::vector<CallGuard::Input> CallGuard::describe_all(const Values& inputs, Records records) {
  std::vector<Input> all;
  all.reserve(inputs.size());
  std::unordered_map<const c10::TensorImpl*, std::size_t> first_of_tensor;
  std::unordered_map<const c10::StorageImpl*, std::size_t> first_of_storage;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Input input;
    input.same_as = input.shares_with = i;
    if (!is_defined_tensor(inputs[i])) {
      input.value = inputs[i];
    } else {
      const at::Tensor& tensor = inputs[i].toTensor();
      input.tensor = geometry_of(tensor);
      input.requires_grad = tensor.requires_grad();
      input.is_leaf = tensor.is_leaf();
      input.same_as = first_of_tensor.try_emplace(tensor.unsafeGetTensorImpl(), i).first->second;
      const auto share = [&](const c10::StorageImpl* storage) {
        if (storage)
          input.shares_with =
              std::min(input.shares_with, first_of_storage.try_emplace(storage, i).first->second);
      };
      share(storage_behind(tensor));
      if (is_subclass(tensor)) {
        if (records == Records::Make)
          input.subclass = std::make_shared<const FlattenRecord>(FlattenRecord::of(tensor, 0));
        for (const at::Tensor& part : plain_parts(tensor)) share(storage_behind(part));
      }
      // Only inputs that share memory may be merged, and how depends on what they are views of.
      input.is_view = input.shares_with != i && tensor.is_view();
    }
    all.push_back(std::move(input));
  }
  return all;
}

CallGuard::Modes CallGuard::current_modes() {
  return {c10::GradMode::is_enabled(), c10::InferenceMode::is_enabled(),
          at::globalContext().deterministicAlgorithms(), autocast_state(),
          c10::get_default_dtype_as_scalartype()};
}

std::string CallGuard::difference(const Modes& is, const Modes& was) {
  const auto differs = [](const char* what, bool now) {
    return fmt::format("{} {} on, in the capture {}", what, now ? "is" : "is not", now ? "not" : "it is");
  };
  if (is.grad != was.grad) return differs("grad mode", is.grad);
  if (is.inference != was.inference) return differs("inference mode", is.inference);
  if (is.deterministic != was.deterministic) return differs("deterministic algorithms", is.deterministic);
  if (is.default_dtype != was.default_dtype)
    return fmt::format("the default dtype is {}, in the capture {}", c10::toString(is.default_dtype),
                       c10::toString(was.default_dtype));
  const auto casts = [](const AutocastState& state) {
    return fmt::format("cpu {}, cuda {}{}", state.cpu ? c10::toString(state.cpu_dtype) : "off",
                       state.cuda ? c10::toString(state.cuda_dtype) : "off",
                       state.cached ? ", with cached weights" : "");
  };
  return fmt::format("autocast is {}, in the capture {}", casts(is.autocast), casts(was.autocast));
}

CallGuard::CallGuard(const Values& inputs, const Convention& convention)
    : inputs_(describe_all(inputs, Records::Make)), names_(convention.names), modes_(current_modes()) {
  for (std::size_t i = 0; i < inputs_.size(); ++i)
    any_sharing_ |= inputs_[i].shares_with != i || inputs_[i].same_as != i;
}

bool CallGuard::same_kind(const std::vector<Input>& a, const std::vector<Input>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Input& x, const Input& y) {
    if (x.tensor.has_value() != y.tensor.has_value()) return false;
    if (!x.tensor) return same_constant(x.value, y.value);
    return x.tensor->sizes.size() == y.tensor->sizes.size() && x.tensor->dtype == y.tensor->dtype &&
           x.tensor->device == y.tensor->device && x.tensor->conjugated == y.tensor->conjugated &&
           x.tensor->negated == y.tensor->negated && x.requires_grad == y.requires_grad &&
           x.is_leaf == y.is_leaf && x.is_view == y.is_view && x.same_as == y.same_as &&
           x.shares_with == y.shares_with;
  });
}

bool CallGuard::same_kind(const Values& inputs) const {
  return current_modes() == modes_ && same_kind(inputs_, describe_all(inputs, Records::None));
}

bool CallGuard::same_kind(const CallGuard& other) const {
  return modes_ == other.modes_ && same_kind(inputs_, other.inputs_);
}

bool CallGuard::holds(const Values& inputs, const BoundSizes* sizes) const {
  if (inputs.size() != inputs_.size() || current_modes() != modes_) return false;
  if (any_sharing_) return difference(inputs, sizes).empty();
  c10::SmallVector<const void*, 32> storages;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Input& expected = inputs_[i];
    if (is_defined_tensor(inputs[i]) != expected.tensor.has_value()) return false;
    if (!expected.tensor) {
      if (!same_constant(inputs[i], expected.value)) return false;
      continue;
    }
    const at::Tensor& tensor = inputs[i].toTensor();
    if (!has_layout(tensor, layout_in_call(*expected.tensor, sizes)) ||
        tensor.scalar_type() != expected.tensor->dtype || tensor.is_conj() != expected.tensor->conjugated ||
        tensor.is_neg() != expected.tensor->negated || tensor.device() != expected.tensor->device ||
        tensor.requires_grad() != expected.requires_grad || tensor.is_leaf() != expected.is_leaf)
      return false;
    if (const void* storage = storage_behind(tensor)) storages.push_back(storage);
    // Has a payload, or should have one.
    if (tensor.key_set().has(c10::DispatchKey::Python) || expected.subclass) [[unlikely]] {
      if (is_subclass(tensor) != (expected.subclass != nullptr)) return false;
      if (!expected.subclass) continue;
      if (!expected.subclass->matches(tensor)) return false;
      c10::SmallVector<const void*, 4> inner;
      for (const at::Tensor& part : plain_parts(tensor))
        if (const void* storage = storage_behind(part)) inner.push_back(storage);
      std::sort(inner.begin(), inner.end());
      storages.append(inner.begin(), std::unique(inner.begin(), inner.end()));
    }
  }
  std::sort(storages.begin(), storages.end());
  return std::adjacent_find(storages.begin(), storages.end()) == storages.end();
}

std::string CallGuard::difference(const Values& inputs, const BoundSizes* sizes,
                                  const SymbolicTable* table) const {
  if (inputs.size() != inputs_.size())
    return fmt::format("{} inputs, in the capture {}", inputs.size(), inputs_.size());
  if (const Modes modes = current_modes(); modes != modes_) return difference(modes, modes_);
  const std::vector<Input> now = describe_all(inputs, Records::None);
  for (std::size_t i = 0; i < now.size(); ++i) {
    const Input &actual = now[i], &expected = inputs_[i];
    const std::string who = i < names_.size() ? names_[i] : fmt::format("input {}", i);
    if (actual.tensor.has_value() != expected.tensor.has_value())
      return fmt::format("{} is {}a tensor, in the capture {}", who, actual.tensor ? "" : "not ",
                         expected.tensor ? "it is" : "it is not");
    if (!actual.tensor) {
      if (!same_constant(actual.value, expected.value))
        return fmt::format("{} is {}, in the capture {}", who, text_of(actual.value),
                           text_of(expected.value));
      continue;
    }
    const at::Tensor& tensor = inputs[i].toTensor();
    if (is_subclass(tensor) != (expected.subclass != nullptr))
      return fmt::format("{} is {}, in the capture {}", who, type_text(tensor),
                         expected.subclass ? expected.subclass->subclass().to_text() : "a plain tensor");
    const Geometry &is = *actual.tensor, &was = *expected.tensor;
    const LayoutInCall layout = layout_in_call(was, sizes);
    if (at::IntArrayRef(is.sizes) != layout.sizes)
      return fmt::format("{} has {}", who, sizes_text(is.sizes, was, layout.sizes, sizes, table));
    if (at::IntArrayRef(is.strides) != layout.strides)
      return fmt::format("{} has strides [{}], in the capture [{}]", who, fmt::join(is.strides, ", "),
                         layout_text(was, table).strides);
    if (is.storage_offset != layout.storage_offset)
      return fmt::format("{} has storage offset {}, in the capture {}", who, is.storage_offset,
                         layout_text(was, table).storage_offset);
    if (is.dtype != was.dtype)
      return fmt::format("{} has dtype {}, in the capture {}", who, c10::toString(is.dtype),
                         c10::toString(was.dtype));
    if (is.conjugated != was.conjugated)
      return fmt::format("{} is {}a lazy conjugate (conj()), in the capture {}", who,
                         is.conjugated ? "" : "not ", was.conjugated ? "it is" : "it is not");
    if (is.negated != was.negated)
      return fmt::format("{} is {}a lazy negative, in the capture {}", who, is.negated ? "" : "not ",
                         was.negated ? "it is" : "it is not");
    if (is.device != was.device)
      return fmt::format("{} is on {}, in the capture {}", who, is.device.str(), was.device.str());
    if (expected.subclass && !expected.subclass->matches(tensor))
      return fmt::format("{} is {}", who, expected.subclass->difference(tensor));
    if (actual.requires_grad != expected.requires_grad)
      return fmt::format("{} {} a gradient, in the capture it {}", who,
                         actual.requires_grad ? "requires" : "does not require",
                         expected.requires_grad ? "does" : "does not");
    if (actual.is_leaf != expected.is_leaf)
      return fmt::format("{} is {}a leaf, in the capture {}", who, actual.is_leaf ? "" : "not ",
                         expected.is_leaf ? "it is" : "it is not");
    if (actual.same_as != expected.same_as || actual.shares_with != expected.shares_with ||
        actual.is_view != expected.is_view)
      return fmt::format("{} shares memory with different inputs than in the capture", who);
  }
  return {};
}

}  // namespace penstock::graph
