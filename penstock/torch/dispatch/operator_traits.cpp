#include "penstock/operator_traits.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

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

// Whether `text` is c10::toString(name).
bool is_text_of(std::string_view text, const c10::OperatorName& name) {
  const std::size_t length = name.name.size(), of_overload = name.overload_name.size();
  if (!text.starts_with(name.name)) return false;
  if (of_overload == 0) return text.size() == length;
  return text.size() == length + 1 + of_overload && text[length] == '.' && text.ends_with(name.overload_name);
}

// Operators whose result is in the memory of their first argument although their schema declares none. All
// others that may return their argument (contiguous, reshape, to, expand_as ...) declare it or are composite.
constexpr std::string_view kUndeclaredViews[] = {"aten::_unsafe_view", "aten::lift"};

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
  if (!known || !is_text_of(known->traits.name, op.operator_name())) {
    all.push_back({all.size(), OperatorTraits(op)});
    known = &all.back();
  }
  return *known;
}

// A table in front of the lock: mostly one comparison for each call. Places are pairs, so that two operators
// that share one do not push each other out.
const Known& known(const c10::OperatorHandle& op) {
  struct Slot {
    const c10::FunctionSchema* key = nullptr;
    const Known* value = nullptr;
  };
  static constexpr std::size_t kPairs = 512;
  static thread_local constinit Slot pairs[kPairs][2] = {};
  const c10::FunctionSchema* key = &op.schema();
  Slot(&pair)[2] = pairs[(reinterpret_cast<std::uintptr_t>(key) / 64) % kPairs];
  if (pair[0].key == key) [[likely]]
    return *pair[0].value;
  if (pair[1].key != key) pair[1] = {key, &look_up(key, op)};
  std::swap(pair[0], pair[1]);
  return *pair[0].value;
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
  if (std::find(std::begin(kUndeclaredViews), std::end(kUndeclaredViews), name) !=
      std::end(kUndeclaredViews)) {
    returns.at(0) = {ReturnAlias::Kind::View, 0, /*declared=*/false};
    any_alias = true;
  }
  pure_view = !mutates && !returns.empty() &&
              std::all_of(returns.begin(), returns.end(), [](const ReturnAlias& alias) {
                return alias.kind == ReturnAlias::Kind::View && alias.declared;
              });
}

const OperatorTraits& traits_of(const c10::OperatorHandle& op) { return known(op).traits; }

std::size_t operator_index(const c10::OperatorHandle& op) { return known(op).index; }

}  // namespace penstock
