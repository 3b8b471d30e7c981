#include "penstock/torch/tree/distributed_type.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

namespace {

struct Registry {
  std::shared_mutex mutex;
  std::vector<std::shared_ptr<const DistributedType>> types;
  std::atomic<bool> any{false};  // lets programs without distributed tensors skip the lock
};

// Never destroyed: a registration with static lifetime may be destroyed after the statics of this file.
Registry& registry() {
  static Registry& only = *new Registry;
  return only;
}

}  // namespace

DistributedTypeRegistration::DistributedTypeRegistration(DistributedType type) {
  if (!type.holds || !type.record || !type.local)
    throw ValueError(describe(fmt::format("distributed type \"{}\"", type.name), "a missing function",
                              "holds, record and local", "set all three"));
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  for (const auto& other : all.types)
    if (other->name == type.name)
      throw ValueError(describe("distributed type", fmt::format("\"{}\" a second time", type.name),
                                "each name once", "keep one registration alive for the whole program"));
  type_ = std::make_shared<const DistributedType>(std::move(type));
  all.types.push_back(type_);
  all.any = true;
}

DistributedTypeRegistration::~DistributedTypeRegistration() {
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  std::erase(all.types, type_);
  all.any = !all.types.empty();
}

std::shared_ptr<const DistributedType> distributed_type_of(const at::Tensor& tensor) {
  Registry& all = registry();
  if (!tensor.defined() || !all.any) return nullptr;
  const std::shared_lock lock(all.mutex);
  const auto found =
      std::find_if(all.types.begin(), all.types.end(), [&](const auto& type) { return type->holds(tensor); });
  return found == all.types.end() ? nullptr : *found;
}

bool is_distributed_tensor(const at::Tensor& tensor) { return distributed_type_of(tensor) != nullptr; }

at::Tensor local_if_distributed(const at::Tensor& tensor) {
  const auto type = distributed_type_of(tensor);
  return type ? type->local(tensor) : tensor;
}

at::Tensor local_if_distributed(const at::Tensor& tensor, DetachTag) {
  return tensor.defined() ? local_if_distributed(tensor.detach()) : tensor;
}

}  // namespace penstock
