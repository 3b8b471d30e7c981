#include "penstock/operator_traits.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace penstock {
namespace {

ArgumentTraits::Kind kind_of(const c10::TypePtr& type) {
  using Kind = ArgumentTraits::Kind;
  c10::TypePtr bare = type;
  if (const auto optional = bare->cast<c10::OptionalType>()) bare = optional->getElementType();
  if (bare->kind() == c10::TypeKind::TensorType) return Kind::Tensor;
  if (const auto list = bare->cast<c10::ListType>()) {
    if (list->getElementType()->kind() == c10::TypeKind::TensorType) return Kind::TensorList;
    if (list->getElementType()->kind() == c10::TypeKind::OptionalType) return Kind::OptionalTensorList;
  }
  return Kind::Other;
}

// The alias sets that a schema declares for an argument or a result: `Tensor(a!)`, or inside a list:
// `Tensor(a!)[]`.
struct AliasSets {
  explicit AliasSets(const c10::AliasInfo* info) {
    if (info) add(*info);
  }
  void add(const c10::AliasInfo& info) {
    written |= info.isWrite();
    sets.insert(info.beforeSets().begin(), info.beforeSets().end());
    for (const c10::AliasInfo& contained : info.containedTypes()) add(contained);
  }
  bool meets(const AliasSets& other) const {
    return std::any_of(sets.begin(), sets.end(),
                       [&](const c10::Symbol& set) { return other.sets.count(set) > 0; });
  }
  std::unordered_set<c10::Symbol> sets;
  bool written = false;
};

// Composite operators that also have kernels of their own (silu_backward) are not decomposed, as with real
// tensors.
bool decomposes(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(DispatchKey::CPU) && !op.hasKernelForDispatchKey(DispatchKey::CUDA);
}

struct Known {
  std::size_t index;
  OperatorTraits traits;
};

const Known& look_up(const c10::FunctionSchema* key, const c10::OperatorHandle& op) {
  // Never freed: threads may end after static objects are destroyed.
  static std::mutex& mutex = *new std::mutex;
  static auto& all = *new std::deque<Known>;
  static auto& by_schema = *new std::unordered_map<const c10::FunctionSchema*, const Known*>;
  const std::lock_guard lock(mutex);
  const Known*& known = by_schema[key];
  // After a library was unloaded, another operator may have a schema at the same address.
  if (!known || known->traits.name != c10::toString(op.operator_name())) {
    all.push_back({all.size(), OperatorTraits(op)});
    known = &all.back();
  }
  return *known;
}

// A direct-mapped table in front of the lock: one comparison per call.
const Known& known(const c10::OperatorHandle& op) {
  struct Slot {
    const c10::FunctionSchema* key = nullptr;
    const Known* value = nullptr;
  };
  static constexpr std::size_t kSlots = 1024;
  static thread_local constinit Slot slots[kSlots] = {};
  const c10::FunctionSchema* key = &op.schema();
  Slot& slot = slots[(reinterpret_cast<std::uintptr_t>(key) / 64) % kSlots];
  if (slot.key != key) [[unlikely]]
    slot = {key, &look_up(key, op)};
  return *slot.value;
}

}  // namespace

OperatorTraits::OperatorTraits(const c10::OperatorHandle& op)
    : name(c10::toString(op.operator_name())), composite(decomposes(op)) {
  const c10::FunctionSchema& schema = op.schema();
  std::vector<AliasSets> argument_sets;
  for (const c10::Argument& argument : schema.arguments()) {
    argument_sets.emplace_back(argument.alias_info());
    mutates |= argument_sets.back().written;
    if (argument.name() == "device") device_argument = static_cast<int>(arguments.size());
    if (argument.name() == "pin_memory") pin_memory_argument = static_cast<int>(arguments.size());
    arguments.push_back({kind_of(argument.type()), argument_sets.back().written});
  }
  for (const c10::Argument& result : schema.returns()) {
    const AliasSets sets(result.alias_info());
    ReturnAlias alias;
    for (std::size_t i = 0; i < argument_sets.size() && alias.argument < 0; ++i)
      if (sets.meets(argument_sets[i])) alias.argument = static_cast<int>(i);
    if (alias.argument >= 0) {
      alias.kind = sets.written ? ReturnAlias::Kind::Same : ReturnAlias::Kind::View;
      any_alias = true;
    }
    returns.push_back(alias);
  }
  pure_view = !mutates && !returns.empty() &&
              std::all_of(returns.begin(), returns.end(),
                          [](const ReturnAlias& alias) { return alias.kind == ReturnAlias::Kind::View; });
}

const OperatorTraits& traits_of(const c10::OperatorHandle& op) { return known(op).traits; }

std::size_t operator_index(const c10::OperatorHandle& op) { return known(op).index; }

}  // namespace penstock
