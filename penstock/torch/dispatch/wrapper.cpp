#include "penstock/tensor_subclass.h"

#include <ATen/EmptyTensor.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <mutex>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/dispatch_kernel.h"
#include "penstock/torch/dispatch/wrapper_impl.h"

namespace penstock {
namespace {

struct KindRegistry {
  std::mutex mutex;
  std::map<std::string, UnflattenFunction, std::less<>> kinds;
  static KindRegistry& instance() {
    static KindRegistry& registry = *new KindRegistry;
    return registry;
  }
};

at::Tensor build(PayloadPtr payload, at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset,
                 caffe2::TypeMeta dtype, at::Device device, bool wrapped_number, const at::Tensor* viewed) {
  detail::install_dispatch_kernel();
  c10::intrusive_ptr<detail::WrapperImpl> impl;
  if (viewed) {
    impl = c10::make_intrusive<detail::WrapperImpl>(c10::TensorImpl::VIEW, c10::Storage(viewed->storage()),
                                                    viewed->key_set(), dtype, std::move(payload));
  } else {
    const std::size_t bytes =
        at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize(), static_cast<std::size_t>(offset));
    impl = c10::make_intrusive<detail::WrapperImpl>(
        detail::empty_storage(bytes, device),
        c10::DispatchKeySet(c10::computeDispatchKey(c10::nullopt, c10::nullopt, device)), dtype,
        std::move(payload));
  }
  impl->set_sizes_and_strides(sizes, strides);
  if (offset != 0) impl->set_storage_offset(offset);
  if (wrapped_number) impl->set_wrapped_number(true);
  return at::Tensor(std::move(impl));
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> Payload::inner_tensors() const {
  throw NotImplemented(
      fmt::format("tensor subclass {}: it cannot be flattened; override Payload::inner_tensors and "
                  "Payload::context, and call register_wrapper_kind",
                  kind()));
}

at::Tensor Payload::rebuild(const std::vector<at::Tensor>& inner, const WrapperGeometry& geometry) const {
  FlatWrapper flat{std::string(kind()), inner_tensors(), context(), geometry};
  if (flat.tensors.size() != inner.size())
    throw ValueError(describe(fmt::format("tensor subclass {}: inner tensors to rebuild it from", kind()),
                              std::to_string(inner.size()), std::to_string(flat.tensors.size())));
  for (std::size_t i = 0; i < inner.size(); ++i) flat.tensors[i].second = inner[i];
  return unflatten_wrapper(flat);
}

at::Tensor Payload::rebuild_gradient(const std::vector<at::Tensor>& inner,
                                     const WrapperGeometry& geometry) const {
  return rebuild(inner, geometry);
}

bool Payload::same_context(const Payload& other) const {
  return typeid(*this) == typeid(other) && context() == other.context();
}

at::Tensor Payload::with_context_of(const at::Tensor&, const Payload&) const { return {}; }

void Payload::refuse(const c10::OperatorHandle& op, std::string_view remedy) const {
  throw TypeError(fmt::format(
      "tensor subclass {}: operator {} is not handled; {}", kind(), c10::toString(op.operator_name()),
      remedy.empty() ? "handle it in the subclass's dispatch, or convert to a plain tensor before the call"
                     : remedy));
}

WrapperGeometry geometry_of(const at::Tensor& tensor) {
  WrapperGeometry geometry;
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  geometry.storage_offset = tensor.storage_offset();
  geometry.dtype = tensor.scalar_type();
  geometry.device = tensor.device();
  geometry.wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  return geometry;
}

at::Tensor make_wrapper(PayloadPtr payload, const WrapperGeometry& geometry, const at::Tensor* viewed) {
  if (!payload)
    throw ValueError("make_wrapper: the payload is null; pass c10::make_intrusive<YourPayload>(...)");
  if (geometry.sizes.size() != geometry.strides.size())
    throw ValueError(describe("make_wrapper: strides", fmt::format("{} of them", geometry.strides.size()),
                              fmt::format("one for each of {} dims", geometry.sizes.size())));
  return build(std::move(payload), geometry.sizes, geometry.strides, geometry.storage_offset,
               c10::scalarTypeToTypeMeta(geometry.dtype), geometry.device, geometry.wrapped_number, viewed);
}

at::Tensor make_wrapper_like(PayloadPtr payload, const at::Tensor& like, const at::Tensor* viewed) {
  return build(std::move(payload), like.sizes(), like.strides(), like.storage_offset(), like.dtype(),
               like.device(), like.unsafeGetTensorImpl()->is_wrapped_number(), viewed);
}

Payload* payload_of(const at::Tensor& tensor) { return detail::payload_of(tensor.unsafeGetTensorImpl()); }

void sync_geometry(const at::Tensor& wrapper, const at::Tensor& inner) {
  sync_geometry(wrapper, inner.sizes(), inner.strides(), inner.storage_offset());
}

void sync_geometry(const at::Tensor& wrapper, at::IntArrayRef sizes, at::IntArrayRef strides,
                   std::int64_t storage_offset) {
  if (wrapper.sizes() == sizes && wrapper.strides() == strides && wrapper.storage_offset() == storage_offset)
    return;
  wrapper.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  wrapper.unsafeGetTensorImpl()->set_storage_offset(storage_offset);
}

void replace_data(const at::Tensor& self, const at::Tensor& other) {
  if (!self.defined() || !other.defined())
    throw TypeError(fmt::format("replace_data: the {} tensor is undefined", self.defined() ? "new" : "old"));
  if (self.requires_grad() && !self.is_leaf())
    throw StateError(
        "replace_data: the tensor is the result of a differentiable operation; only a leaf, like a "
        "parameter, can be "
        "replaced (detach() returns one)");
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  const std::type_info& type = typeid(*impl);
  const bool plain = type == typeid(c10::TensorImpl);
  if (!plain && type != typeid(detail::WrapperImpl) && type != typeid(detail::AdoptedImpl))
    throw TypeError(describe("replace_data: the tensor",
                             c10::str(self.toString(), ", a special kind of tensor"),
                             "a dense tensor or a wrapper"));
  if (plain && is_wrapper(other)) {
    detail::install_dispatch_kernel();
    detail::AdoptedImpl::adopt(impl);
  }
  self.set_data(other);
  // The gradient accumulator stores the shape it was created for; the next backward creates a new one.
  if (auto* autograd = torch::autograd::impl::get_autograd_meta(self)) {
    const std::lock_guard lock(autograd->mutex_);
    autograd->grad_accumulator_.reset();
  }
}

FlatWrapper flatten_wrapper(const at::Tensor& wrapper) {
  const Payload* payload = wrapper.defined() ? payload_of(wrapper) : nullptr;
  if (!payload)
    throw TypeError(describe("flatten_wrapper", wrapper.defined() ? "a plain tensor" : "an undefined tensor",
                             "a wrapper", "check is_wrapper() first"));
  return {std::string(payload->kind()), payload->inner_tensors(), payload->context(), geometry_of(wrapper)};
}

at::Tensor unflatten_wrapper(const FlatWrapper& flat) {
  UnflattenFunction unflatten;
  {
    KindRegistry& registry = KindRegistry::instance();
    const std::lock_guard lock(registry.mutex);
    const auto found = registry.kinds.find(flat.kind);
    if (found == registry.kinds.end()) {
      std::string known;
      for (const auto& [kind, _] : registry.kinds) known += (known.empty() ? "" : ", ") + kind;
      throw TypeError(describe("unflatten_wrapper: kind", flat.kind,
                               known.empty() ? "a registered kind (none is registered)" : known,
                               "call register_wrapper_kind for it at the start of the program"));
    }
    unflatten = found->second;
  }
  return unflatten(flat);
}

void register_wrapper_kind(const std::string& kind, UnflattenFunction unflatten) {
  KindRegistry& registry = KindRegistry::instance();
  const std::lock_guard lock(registry.mutex);
  if (!registry.kinds.emplace(kind, std::move(unflatten)).second)
    throw StateError(fmt::format(
        "register_wrapper_kind: kind {} is already registered; choose another name for your subclass", kind));
}

namespace detail {

void refuse_plain_write(const OperatorTraits& traits, std::size_t argument, std::string_view kind) {
  throw TypeError(
      fmt::format("tensor subclass {}: {} writes argument {}, which is a plain tensor and cannot hold the "
                  "result; use the "
                  "out-of-place form, or make that tensor a {} first",
                  kind, traits.name, argument, kind));
}

}  // namespace detail

BelowWrappersGuard::BelowWrappersGuard() : exclude_(c10::DispatchKeySet(c10::DispatchKey::Python)) {}

}  // namespace penstock
