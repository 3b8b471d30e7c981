#include "penstock/dtensor/tensor/rule_registry.h"

#include <fmt/format.h>

#include <atomic>
#include <mutex>
#include <set>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace detail {

void RuleTable::add(std::initializer_list<std::string_view> names, const ShardingRule& rule,
                    const RuleOptions& options) {
  for (const std::string_view name : names)
    put(fmt::format("aten::{}", name), {rule, options, nullptr, true, {}}, false);
}

void RuleTable::handle(const std::vector<std::string>& names, const ShardingHandler& handler) {
  for (const std::string& name : names)
    put(fmt::format("aten::{}", name), {nullptr, {}, handler, true, {}}, false);
}

void RuleTable::put(const std::string& op, RegisteredRule rule, bool replace) {
  auto& known = rules_[op];
  if (!known.empty() && !replace)
    throw StateError(fmt::format("sharding rule of {}: already registered{}", op,
                                 known.back()->built_in ? "; use replace_sharding_rule to replace it"
                                                        : "; register each operator once"));
  rule.name = op;
  known.push_back(std::make_unique<RegisteredRule>(std::move(rule)));
}

const RegisteredRule* RuleTable::find(const std::string& op) const {
  const auto look = [this](std::string_view name) -> const RegisteredRule* {
    const auto found = rules_.find(name);
    return found == rules_.end() ? nullptr : found->second.back().get();
  };
  if (const RegisteredRule* rule = look(op)) return rule;
  const std::size_t dot = op.find('.', op.find("::"));
  const std::string base = op.substr(0, dot), overload = dot == std::string::npos ? "" : op.substr(dot);
  if (const RegisteredRule* rule = look(base)) return rule;
  if (base.size() > 1 && base.back() == '_' && base[base.size() - 2] != '_') {
    const std::string functional = base.substr(0, base.size() - 1);
    if (const RegisteredRule* rule = look(functional + overload)) return rule;
    return look(functional);
  }
  return nullptr;
}

std::vector<std::string> RuleTable::names() const {
  std::vector<std::string> all;
  for (const auto& [name, _] : rules_) all.push_back(name);
  return all;
}

namespace {

struct Registry {
  std::mutex mutex;
  RuleTable table;
  std::set<std::string> asked;
  std::atomic<std::uint64_t> generation = 1;

  Registry() {
    add_pointwise_rules(table);
    add_matmul_rules(table);
    add_view_rules(table);
    add_dim_rules(table);
    add_reduction_rules(table);
    add_argmax_rules(table);
    add_factory_rules(table);
    add_softmax_rules(table);
    add_loss_rules(table);
    add_normalization_rules(table);
    add_embedding_rules(table);
    add_attention_rules(table);
    add_convolution_rules(table);
    add_index_rules(table);
    add_advanced_index_rules(table);
    add_slice_gradient_rules(table);
    add_selection_rules(table);
    add_as_strided_rules(table);
    add_random_rules(table);
    add_norm_rules(table);
    add_foreach_rules(table);
    add_weight_norm_rules(table);
  }

  // Never freed: tensors may outlive every static object.
  static Registry& instance() {
    static Registry& registry = *new Registry;
    return registry;
  }

  void put(const std::string& op, RegisteredRule rule, bool replace) {
    if (op.find("::") == std::string::npos)
      throw ValueError(describe("sharding rule: operator", op,
                                "a name with its namespace, like aten::add or my::op.overload"));
    const std::lock_guard lock(mutex);
    table.put(op, std::move(rule), replace);
    ++generation;
  }
};

}  // namespace

const RegisteredRule* find_rule(const std::string& op) {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  return registry.table.find(op);
}

std::uint64_t rule_generation() { return Registry::instance().generation.load(std::memory_order_relaxed); }

void record_rule_use(const RegisteredRule& rule) {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  registry.asked.insert(rule.name);
}

std::vector<std::string> take_used_rules() {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  std::vector<std::string> names(registry.asked.begin(), registry.asked.end());
  registry.asked.clear();
  return names;
}

}  // namespace detail

void register_sharding_rule(const std::string& op, ShardingRule rule, const RuleOptions& options) {
  detail::Registry::instance().put(op, {std::move(rule), options, nullptr, false, {}}, false);
}

void replace_sharding_rule(const std::string& op, ShardingRule rule, const RuleOptions& options) {
  detail::Registry::instance().put(op, {std::move(rule), options, nullptr, false, {}}, true);
}

void register_sharding_handler(const std::string& op, ShardingHandler handler) {
  detail::Registry::instance().put(op, {nullptr, {}, std::move(handler), false, {}}, false);
}

bool has_sharding_rule(const std::string& op) { return detail::find_rule(op) != nullptr; }

std::vector<std::string> sharding_rule_names() {
  auto& registry = detail::Registry::instance();
  const std::lock_guard lock(registry.mutex);
  return registry.table.names();
}

}  // namespace penstock
