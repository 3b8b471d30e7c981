#include "penstock/torch/operator_traits.h"

#include <deque>
#include <mutex>
#include <unordered_map>

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

// The argument that shares an alias set with this result, or -1. A set is named in the schema: `Tensor(a!)`.
int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& result) {
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* argument = schema.arguments()[i].alias_info();
    if (!argument) continue;
    for (const auto& set : result.beforeSets())
      if (argument->beforeSets().count(set)) return static_cast<int>(i);
  }
  return -1;
}

struct Known {
  std::size_t index;
  OperatorTraits traits;
};

const Known& look_up(const c10::FunctionSchema* key, const c10::OperatorHandle& op) {
  // Never freed: threads may end after static objects are gone.
  static std::mutex& mutex = *new std::mutex;
  static auto& all = *new std::deque<Known>;
  static auto& by_schema = *new std::unordered_map<const c10::FunctionSchema*, const Known*>;
  const std::lock_guard lock(mutex);
  const Known*& known = by_schema[key];
  // A library that was unloaded may have left its schema's address to another operator.
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
  static thread_local std::vector<Slot> slots(kSlots);
  const c10::FunctionSchema* key = &op.schema();
  Slot& slot = slots[(reinterpret_cast<std::uintptr_t>(key) / 64) % kSlots];
  if (slot.key != key) [[unlikely]]
    slot = {key, &look_up(key, op)};
  return *slot.value;
}

}  // namespace

OperatorTraits::OperatorTraits(const c10::OperatorHandle& op)
    : name(c10::toString(op.operator_name())),
      composite(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
  const c10::FunctionSchema& schema = op.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    mutates |= written;
    if (argument.name() == "device") device_argument = static_cast<int>(arguments.size());
    if (argument.name() == "pin_memory") pin_memory_argument = static_cast<int>(arguments.size());
    arguments.push_back({kind_of(argument.type()), written});
  }
  for (const c10::Argument& result : schema.returns()) {
    ReturnAlias alias;
    if (result.alias_info()) alias.argument = aliased_argument(schema, *result.alias_info());
    if (alias.argument >= 0) {
      alias.kind = result.alias_info()->isWrite() ? ReturnAlias::Kind::Same : ReturnAlias::Kind::View;
      any_alias = true;
    }
    returns.push_back(alias);
  }
}

const OperatorTraits& traits_of(const c10::OperatorHandle& op) { return known(op).traits; }

std::size_t operator_index(const c10::OperatorHandle& op) { return known(op).index; }

}  // namespace penstock
