#include "penstock/shard/state/registry.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/fake.h"
#include "penstock/torch/dispatch/any_operator_hook.h"

namespace penstock::detail {
namespace {

// Holds the memory weakly, so that no other storage can have this address while the entry is in the table.
struct Derived {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  ShardGroup* group;
};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<const void*, Membership> members;
  std::unordered_map<const void*, Derived> derived;
  std::size_t next_sweep = 64;
  std::atomic<int> replacements = 0;
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

void register_derived(const at::Tensor& tensor, ShardGroup& group) {
  const DTensorPayload* payload = dtensor_payload(tensor);
  if (!payload || is_wrapper(payload->local())) return;
  const c10::Storage& memory = payload->local().storage();
  mark_for_any_hook(tensor);
  const std::unique_lock lock(table().mutex);
  auto& derived = table().derived;
  if (table().members.contains(memory.unsafeGetStorageImpl()) ||
      derived.contains(memory.unsafeGetStorageImpl()))
    return;
  if (derived.size() >= table().next_sweep) {
    std::erase_if(derived, [](const auto& entry) { return entry.second.memory.expired(); });
    table().next_sweep = std::max<std::size_t>(64, 2 * derived.size());
  }
  derived.emplace(memory.unsafeGetStorageImpl(), Derived{memory.getWeakStorageImpl(), &group});
}

void unregister_derived(const ShardGroup& group) {
  const std::unique_lock lock(table().mutex);
  std::erase_if(table().derived, [&](const auto& entry) { return entry.second.group == &group; });
}

void count_replacements(int change) { table().replacements.fetch_add(change, std::memory_order_relaxed); }
bool replacements_pending() { return table().replacements.load(std::memory_order_relaxed) != 0; }

Membership find_parameter(const at::Tensor& tensor) {
  const std::shared_lock lock(table().mutex);
  const auto found = table().members.find(tensor.unsafeGetTensorImpl());
  return found == table().members.end() ? Membership() : found->second;
}

Membership find_member(const at::Tensor& tensor) {
  const DTensorPayload* payload = dtensor_payload(tensor);
  at::Tensor part;  // of a subclass that keeps gathered memory in its own encoding
  if (const Payload* wrapped = payload ? nullptr : payload_of(tensor); wrapped && !is_fake(tensor))
    if (const auto parts = wrapped->inner_tensors(); !parts.empty()) part = parts.front().second;
  const std::shared_lock lock(table().mutex);
  const auto& members = table().members;
  if (const auto found = members.find(tensor.unsafeGetTensorImpl()); found != members.end())
    return found->second;
  const at::Tensor& local = payload ? payload->local() : part.defined() ? part : tensor;
  if (!local.has_storage()) return {};
  const void* memory = local.storage().unsafeGetStorageImpl();
  if (const auto found = members.find(memory); found != members.end()) return found->second;
  if (!payload) return {};
  const auto found = table().derived.find(memory);
  return found == table().derived.end() ? Membership() : Membership{found->second.group, kDerived};
}

}  // namespace penstock::detail
