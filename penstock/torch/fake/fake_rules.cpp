// Chooses how each operator is run in shape only.
#include <fmt/format.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "penstock/operator_traits.h"
#include "penstock/torch/fake/fake_payload.h"
#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock {
namespace detail {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, c10::KernelFunction> functions;
  // By operator_index. Rules are created on first use and dropped when a function is registered; never freed,
  // so that a thread can continue with the one it holds.
  std::vector<const FakeRule*> rules;
  std::atomic<unsigned> generation{1};

  static Registry& instance() {
    static Registry& registry = *new Registry;
    return registry;
  }
};

// The library's own shape functions are added at the first lookup, not at program start: registering needs
// the dispatcher.
void ensure_own_functions() {
  static std::once_flag once;
  std::call_once(once, [] { add_own_shape_functions(); });
}

// Operators whose output shape depends on values. LibTorch's tags mark them, but only some in older versions.
bool depends_on_data(const c10::OperatorHandle& op) {
  static const std::set<std::string> known = {"aten::_local_scalar_dense",
                                              "aten::item",
                                              "aten::nonzero",
                                              "aten::nonzero_numpy",
                                              "aten::masked_select",
                                              "aten::_unique",
                                              "aten::_unique2",
                                              "aten::unique_dim",
                                              "aten::unique_consecutive",
                                              "aten::unique_dim_consecutive",
                                              "aten::bincount",
                                              "aten::equal",
                                              "aten::is_nonzero",
                                              "aten::argwhere",
                                              "aten::allclose",
                                              "aten::_is_all_true",
                                              "aten::_is_any_true"};
  if (known.count(op.operator_name().name)) return true;
  if (op.operator_name().name == "aten::repeat_interleave" && op.operator_name().overload_name == "Tensor")
    return true;
  if (op.operator_name().name == "aten::index")
    return false;  // only with masks, which its shape function refuses
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// Returns a function derived from the operator's kind or from its functional overload, or null.
const c10::KernelFunction* derived_function(const c10::OperatorHandle& op, Registry& registry) {
  static const auto& nothing =
      *new c10::KernelFunction(c10::KernelFunction::makeFromBoxedFunction<write_only>());
  static const auto& functional =
      *new c10::KernelFunction(c10::KernelFunction::makeFromBoxedFunction<shape_of_functional>());
  const OperatorTraits& traits = traits_of(op);
  if (traits.mutates && traits.returns.empty() && traits.name.rfind("aten::", 0) == 0) return &nothing;
  const auto overload = functional_overload(op);
  if (!overload) return nullptr;
  const bool known = registry.functions.count(c10::toString(overload->operator_name())) > 0 ||
                     overload->hasKernelForDispatchKey(c10::DispatchKey::Meta);
  return known ? &functional : nullptr;
}

FakeRule make_rule(const c10::OperatorHandle& op, Registry& registry) {
  static const std::set<std::string> mixing = {"aten::copy_",      "aten::_copy_from",
                                               "aten::index",      "aten::index_put",
                                               "aten::index_put_", "aten::_index_put_impl_"};
  FakeRule rule;
  rule.mixes_devices = mixing.count(op.operator_name().name) > 0;
  rule.composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                   op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  rule.compares = op.operator_name().name == "aten::eq" && op.operator_name().overload_name == "Scalar";
  rule.fills = op.operator_name().name == "aten::fill_" && op.operator_name().overload_name == "Scalar";
  const auto found = registry.functions.find(c10::toString(op.operator_name()));
  if (found != registry.functions.end()) {
    rule.kind = FakeRule::Kind::Shape;
    rule.shape = &found->second;
  } else if (depends_on_data(op)) {
    rule.kind = FakeRule::Kind::DataDependent;
  } else if (has_meta_kernel(op)) {
    rule.kind = FakeRule::Kind::Meta;
  } else if (const c10::KernelFunction* derived = derived_function(op, registry)) {
    rule.kind = FakeRule::Kind::Shape;
    rule.shape = derived;
  }
  return rule;
}

const FakeRule* look_up(const c10::OperatorHandle& op, std::size_t index) {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  if (registry.rules.size() <= index) registry.rules.resize(index + 1);
  const FakeRule*& rule = registry.rules[index];
  if (!rule) rule = new FakeRule(make_rule(op, registry));
  return rule;
}

}  // namespace

const FakeRule& fake_rule(const c10::OperatorHandle& op) {
  ensure_own_functions();
  struct Local {
    unsigned generation = 0;
    std::vector<const FakeRule*> rules;
  };
  static thread_local Local local;
  const unsigned generation = Registry::instance().generation.load(std::memory_order_acquire);
  if (local.generation != generation) local = {generation, {}};
  const std::size_t index = operator_index(op);
  if (local.rules.size() <= index) local.rules.resize(index + 64);
  const FakeRule*& rule = local.rules[index];
  if (!rule) rule = look_up(op, index);
  return *rule;
}

void mark_for_decomposition(const c10::OperatorHandle& op) {
  Registry& registry = Registry::instance();
  const std::size_t index = operator_index(op);
  const std::lock_guard lock(registry.mutex);
  auto* rule = new FakeRule(*registry.rules[index]);
  rule->kind = FakeRule::Kind::Decompose;
  registry.rules[index] = rule;
  registry.generation.fetch_add(1, std::memory_order_release);
}

void add_shape_function(const std::string& op, c10::KernelFunction kernel, int arguments) {
  if (const auto handle = find_operator(op); handle && arguments >= 0)
    if (const auto expected = static_cast<int>(handle->schema().arguments().size()); arguments != expected)
      throw TypeError(
          fmt::format("register_shape_function: the function for {} takes {} arguments, its schema has {}: "
                      "{}; declare the function with "
                      "the arguments of the schema",
                      op, arguments, expected, c10::toString(handle->schema())));
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  if (!registry.functions.emplace(op, std::move(kernel)).second)
    throw StateError(fmt::format("register_shape_function: {} already has one", op));
  registry.rules.clear();
  registry.generation.fetch_add(1, std::memory_order_release);
}

}  // namespace detail

bool has_shape_function(const std::string& op) {
  const auto handle = detail::find_operator(op);
  if (!handle) return false;
  const auto kind = detail::fake_rule(*handle).kind;
  return kind != detail::FakeRule::Kind::Missing && kind != detail::FakeRule::Kind::DataDependent;
}

}  // namespace penstock
