// The TensorImpl classes of wrappers. Private to this folder; users include wrapper.h.
//
// Two classes with the same behaviour. make_wrapper creates a WrapperImpl, which holds the payload.
// AdoptedImpl is a plain TensorImpl that became a wrapper in place, because a user's module holds handles to
// it: it must not be larger than TensorImpl, so its payload is attached to its storage. Either can become
// plain again (replace_data with a plain tensor): without a payload it lacks the dispatch key and behaves
// like its base class.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "penstock/errors.h"
#include "penstock/tensor_subclass.h"

namespace penstock::detail {

// Returns a storage of `bytes` bytes without memory.
c10::Storage empty_storage(std::size_t bytes, at::Device device);

class WrapperImpl final : public c10::TensorImpl {
 public:
  WrapperImpl(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype, PayloadPtr payload);
  // With exactly these keys, those of the viewed tensor; the other constructor takes the keys from the
  // thread's state.
  WrapperImpl(ImplType, c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
              PayloadPtr payload);

  Payload* payload() const { return payload_.get(); }
  void add_key(c10::DispatchKey key) { key_set_ = key_set_.add(key); }
  const PayloadPtr& payload_ptr() const { return payload_; }
  // Returns a wrapper with the metadata of `src` and another payload.
  static c10::intrusive_ptr<WrapperImpl> copy_of(const c10::TensorImpl& src, PayloadPtr payload,
                                                 const c10::VariableVersion& version,
                                                 bool allow_metadata_change);

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                              bool allow) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) override;
  void release_resources() override;

 private:
  const char* tensorimpl_type_name() const override { return "penstock::WrapperImpl"; }
  PayloadPtr payload_;
};

class AdoptedImpl final : public c10::TensorImpl {
 public:
  // Turns a plain TensorImpl into an AdoptedImpl without a payload, in place.
  static void adopt(c10::TensorImpl* plain);

  Payload* payload() const;
  void add_key(c10::DispatchKey key) { key_set_ = key_set_.add(key); }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                              bool allow) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) override;

 private:
  AdoptedImpl();  // the sample object whose vtable pointer others take
  const char* tensorimpl_type_name() const override { return "penstock::AdoptedImpl"; }
};
static_assert(sizeof(AdoptedImpl) == sizeof(c10::TensorImpl),
              "a TensorImpl must be able to become an AdoptedImpl in place");

Payload* payload_of(const c10::TensorImpl* impl);

}  // namespace penstock::detail
