#include "penstock/pipeline/infer/trial_copies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "penstock/errors.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/fake/fake_parts.h"

namespace penstock {
namespace {

constexpr std::int64_t kAlignment = 16;  // a multiple of every element size

bool is_strided_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_meta();
}

std::int64_t first_byte(const at::Tensor& tensor) {
  return tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
}

std::int64_t bytes_spanned(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t elements = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
  return elements * static_cast<std::int64_t>(tensor.element_size());
}

// The inner tensors of a subclass; std::nullopt for one that cannot be unwrapped.
std::optional<std::vector<at::Tensor>> parts_of(const Payload& payload) {
  std::vector<at::Tensor> parts;
  try {
    for (const auto& [name, inner] : payload.inner_tensors()) parts.push_back(inner);
  } catch (const NotImplemented&) {
    return std::nullopt;
  }
  return parts;
}

}  // namespace

TrialCopies::TrialCopies(const std::vector<at::Tensor>& tensors, bool fake) : fake_(fake) {
  if (fake_) return;
  for (const at::Tensor& tensor : tensors) add_span(tensor);
}

void TrialCopies::add_span(const at::Tensor& tensor) {
  if (const Payload* payload = payload_of(tensor)) {
    if (const auto parts = parts_of(*payload))
      for (const at::Tensor& inner : *parts) add_span(inner);
    return;
  }
  if (!is_strided_memory(tensor)) return;
  const std::int64_t begin = first_byte(tensor) / kAlignment * kAlignment,
                     end = first_byte(tensor) + bytes_spanned(tensor);
  const auto [entry, is_new] =
      spans_.try_emplace(tensor.storage().unsafeGetStorageImpl(), Span{begin, end, {}});
  if (is_new) return;
  entry->second.begin = std::min(entry->second.begin, begin);
  entry->second.end = std::max(entry->second.end, end);
}

at::Tensor TrialCopies::copy_strided(const at::Tensor& tensor) {
  const auto found = spans_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == spans_.end()) return tensor.clone();
  Span& span = found->second;
  if (first_byte(tensor) < span.begin || first_byte(tensor) + bytes_spanned(tensor) > span.end)
    return tensor.clone();
  if (!span.copy.defined()) {
    const at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte));
    span.copy = bytes.set_(tensor.storage(), span.begin, {span.end - span.begin}, {1}).clone();
  }
  const std::int64_t offset =
      (first_byte(tensor) - span.begin) / static_cast<std::int64_t>(tensor.element_size());
  return at::empty({0}, tensor.options()).set_(span.copy.storage(), offset, tensor.sizes(), tensor.strides());
}

at::Tensor TrialCopies::copy(const at::Tensor& tensor) {
  if (const Payload* payload = payload_of(tensor)) {
    auto parts = parts_of(*payload);
    if (!parts) return tensor.clone();
    for (at::Tensor& part : *parts) part = copy(part);
    return payload->rebuild(*parts, geometry_of(tensor));
  }
  return is_strided_memory(tensor) ? copy_strided(tensor) : tensor.clone();
}

at::Tensor TrialCopies::of(const at::Tensor& tensor) {
  at::Tensor& made = made_[tensor.unsafeGetTensorImpl()];
  if (made.defined()) return made;
  const at::NoGradGuard no_grad;
  originals_.push_back(tensor);
  const at::Tensor plain = tensor.detach();
  made = fake_ ? to_fake_parts(plain) : copy(plain);
  made.set_requires_grad(tensor.requires_grad());
  return made;
}

}  // namespace penstock
