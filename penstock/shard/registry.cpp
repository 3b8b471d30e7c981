#include "penstock/shard/registry.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "penstock/dtensor/dtensor_payload.h"
#include "penstock/torch/fake.h"

namespace penstock::detail {
namespace {

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<const void*, Membership> members;
};

// Never destroyed: tensors may outlive every static object.
Table& table() {
  static Table& instance = *new Table;
  return instance;
}

}  // namespace

void register_member(const void* key, Membership member) {
  const std::unique_lock lock(table().mutex);
  table().members[key] = member;
}

void unregister_member(const void* key) {
  const std::unique_lock lock(table().mutex);
  table().members.erase(key);
}

Membership find_parameter(const at::Tensor& tensor) {
  const std::shared_lock lock(table().mutex);
  const auto found = table().members.find(tensor.unsafeGetTensorImpl());
  return found == table().members.end() ? Membership() : found->second;
}

Membership find_member(const at::Tensor& tensor) {
  const DTensorPayload* payload = dtensor_payload(tensor);
  at::Tensor part;  // of a subclass that keeps gathered memory in its own form
  if (const Payload* wrapped = payload ? nullptr : payload_of(tensor); wrapped && !is_fake(tensor))
    if (const auto parts = wrapped->inner_tensors(); !parts.empty()) part = parts.front().second;
  const std::shared_lock lock(table().mutex);
  const auto& members = table().members;
  if (const auto found = members.find(tensor.unsafeGetTensorImpl()); found != members.end()) return found->second;
  const at::Tensor& local = payload ? payload->local() : part.defined() ? part : tensor;
  if (is_wrapper(local)) return {};
  const auto found = members.find(local.storage().unsafeGetStorageImpl());
  return found == members.end() ? Membership() : found->second;
}

}  // namespace penstock::detail
