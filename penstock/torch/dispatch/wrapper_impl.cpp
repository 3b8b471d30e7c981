#include "penstock/torch/dispatch/wrapper_impl.h"
#include "penstock/base/describe.h"

#include <cstring>
#include <typeinfo>

namespace penstock::detail {
namespace {

void release_payload(void* payload) { c10::raw::intrusive_ptr::decref(static_cast<Payload*>(payload)); }

// A storage without memory that owns a payload.
c10::Storage payload_storage(Payload* payload, std::size_t bytes, at::Device device) {
  c10::raw::intrusive_ptr::incref(payload);
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                            at::DataPtr(nullptr, payload, &release_payload, device), nullptr,
                                            /*resizable=*/false));
}

PayloadPtr share(Payload* payload) { return PayloadPtr::reclaim_copy(payload); }

}  // namespace

c10::Storage empty_storage(std::size_t bytes, at::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            at::DataPtr(nullptr, device), nullptr,
                                                            /*resizable=*/false));
}

Payload* payload_of(const c10::TensorImpl* impl) {
  if (!impl->key_set().has(c10::DispatchKey::Python)) return nullptr;
  const std::type_info& type = typeid(*impl);
  if (type == typeid(WrapperImpl)) return static_cast<const WrapperImpl*>(impl)->payload();
  if (type == typeid(AdoptedImpl)) return static_cast<const AdoptedImpl*>(impl)->payload();
  return nullptr;
}

// ---- WrapperImpl ----

WrapperImpl::WrapperImpl(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
                         PayloadPtr payload)
    : c10::TensorImpl(std::move(storage), keys, dtype), payload_(std::move(payload)) {
  key_set_ = key_set_.add(c10::DispatchKey::Python);  // the base constructor removes it
}

WrapperImpl::WrapperImpl(ImplType type, c10::Storage&& storage, c10::DispatchKeySet keys,
                         caffe2::TypeMeta dtype, PayloadPtr payload)
    : c10::TensorImpl(type, std::move(storage), keys, dtype), payload_(std::move(payload)) {
  key_set_ = key_set_.add(c10::DispatchKey::Python);
}

c10::intrusive_ptr<WrapperImpl> WrapperImpl::copy_of(const c10::TensorImpl& src, PayloadPtr payload,
                                                     const c10::VariableVersion& version,
                                                     bool allow_metadata_change) {
  auto copy = c10::make_intrusive<WrapperImpl>(c10::Storage(src.unsafe_storage()), src.key_set(), src.dtype(),
                                               std::move(payload));
  copy_tensor_metadata(&src, copy.get(), version, allow_metadata_change);
  copy->refresh_numel();
  copy->refresh_contiguous();
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> WrapperImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                         bool allow) const {
  if (!payload_) return c10::TensorImpl::shallow_copy_and_detach(version, allow);
  return copy_of(*this, payload_, version, allow);
}

c10::intrusive_ptr<c10::TensorImpl> WrapperImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                         bool allow) const {
  if (!payload_) return c10::TensorImpl::shallow_copy_and_detach(std::move(version), allow);
  return copy_of(*this, payload_, version, allow);
}

void WrapperImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) {
  Payload* theirs = payload_of(other.get());
  PayloadPtr payload = theirs ? share(theirs) : PayloadPtr();
  c10::TensorImpl::shallow_copy_from(other);
  payload_ = std::move(payload);
  // The base class leaves this key of the set unchanged.
  key_set_ = payload_ ? key_set_.add(c10::DispatchKey::Python) : key_set_.remove(c10::DispatchKey::Python);
}

void WrapperImpl::release_resources() {
  c10::TensorImpl::release_resources();
  payload_.reset();
}

// ---- AdoptedImpl ----

AdoptedImpl::AdoptedImpl()
    : c10::TensorImpl(c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(),
                      at::Device(at::kCPU)) {}

void AdoptedImpl::adopt(c10::TensorImpl* plain) {
  PENSTOCK_INVARIANT(typeid(*plain) == typeid(c10::TensorImpl), "only a plain TensorImpl may be adopted");
  // Both classes have the same members, and in the Itanium ABI an object with virtual functions starts with
  // its vtable pointer. Overwriting that pointer is the only way to change the behaviour of an object that
  // others hold by address. The tests of replace_data check this for each new LibTorch version.
  static const AdoptedImpl& sample = *new AdoptedImpl();
  std::memcpy(static_cast<void*>(plain), static_cast<const void*>(&sample), sizeof(void*));
}

Payload* AdoptedImpl::payload() const { return static_cast<Payload*>(storage_.data_ptr().get_context()); }

c10::intrusive_ptr<c10::TensorImpl> AdoptedImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                         bool allow) const {
  Payload* mine = payload_of(this);
  if (!mine) return c10::TensorImpl::shallow_copy_and_detach(version, allow);
  return WrapperImpl::copy_of(*this, share(mine), version, allow);
}

c10::intrusive_ptr<c10::TensorImpl> AdoptedImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                         bool allow) const {
  Payload* mine = payload_of(this);
  if (!mine) return c10::TensorImpl::shallow_copy_and_detach(std::move(version), allow);
  return WrapperImpl::copy_of(*this, share(mine), version, allow);
}

void AdoptedImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) {
  Payload* theirs = payload_of(other.get());
  const PayloadPtr keep = theirs ? share(theirs) : PayloadPtr();  // `other` may be this
  c10::TensorImpl::shallow_copy_from(other);
  if (theirs) {
    storage_ = payload_storage(theirs, storage_.nbytes(), device());
    key_set_ = key_set_.add(c10::DispatchKey::Python);
  } else {
    key_set_ = key_set_.remove(c10::DispatchKey::Python);
  }
}

}  // namespace penstock::detail
