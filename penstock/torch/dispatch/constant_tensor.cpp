#include "penstock/torch/dispatch/constant_tensor.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace penstock {
namespace {

// By the address of the storage. An address is used again only after the weak pointer has expired.
class Constants {
 public:
  static Constants& all() {
    static Constants constants;
    return constants;
  }

  void add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    for (auto it = memory_.begin(); it != memory_.end();)
      it = it->second.expired() ? memory_.erase(it) : ++it;
    memory_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), tensor.storage().getWeakStorageImpl());
  }

  bool contains(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = memory_.find(tensor.storage().unsafeGetStorageImpl());
    return found != memory_.end() && !found->second.expired();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> memory_;
};

}  // namespace

at::Tensor constant_tensor(at::Tensor tensor) {
  if (tensor.defined() && tensor.has_storage()) Constants::all().add(tensor);
  return tensor;
}

bool is_constant_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor.is_inference() && tensor._version() == 0 &&
         Constants::all().contains(tensor);
}

}  // namespace penstock
