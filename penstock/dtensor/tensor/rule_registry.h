// The registry of rules, and the functions by which each rule family adds its own. Private to this folder.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/sharding_rule.h"

namespace penstock::detail {

struct RegisteredRule {
  ShardingRule rule;
  RuleOptions options;
  ShardingHandler handler;
  bool built_in = false;
  std::string name;  // as registered; filled in by the table
};

class RuleTable {
 public:
  // Names without "aten::".
  void add(std::initializer_list<std::string_view> names, const ShardingRule& rule,
           const RuleOptions& options = {});
  void handle(const std::vector<std::string>& names, const ShardingHandler& handler);

  void put(const std::string& op, RegisteredRule rule, bool replace);
  // Looks up the whole name, then without the overload, then without the underscore of in-place forms.
  const RegisteredRule* find(const std::string& op) const;
  std::vector<std::string> names() const;

 private:
  // Replaced rules are kept, because a thread may be using one.
  std::map<std::string, std::vector<std::unique_ptr<RegisteredRule>>, std::less<>> rules_;
};

// Returns the rule of an operator by traits.name, or null. It lives until the process ends.
const RegisteredRule* find_rule(const std::string& op);
// Incremented by every registration; caches of decisions compare it.
std::uint64_t rule_generation();

// Records that a rule was used. Called when a decision is made, and once per thread for a handler, not for
// every call.
void record_rule_use(const RegisteredRule& rule);
// The names recorded since the last call by any thread, sorted: tests use it to find unused rules.
std::vector<std::string> take_used_rules();

// One function per file.
void add_pointwise_rules(RuleTable& table);
void add_matmul_rules(RuleTable& table);
void add_view_rules(RuleTable& table);
void add_dim_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_argmax_rules(RuleTable& table);
void add_factory_rules(RuleTable& table);
void add_softmax_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);
void add_normalization_rules(RuleTable& table);
void add_embedding_rules(RuleTable& table);
void add_attention_rules(RuleTable& table);
void add_convolution_rules(RuleTable& table);
void add_index_rules(RuleTable& table);
void add_advanced_index_rules(RuleTable& table);
void add_slice_gradient_rules(RuleTable& table);
void add_selection_rules(RuleTable& table);
void add_as_strided_rules(RuleTable& table);
void add_random_rules(RuleTable& table);
void add_norm_rules(RuleTable& table);
void add_foreach_rules(RuleTable& table);
void add_weight_norm_rules(RuleTable& table);

}  // namespace penstock::detail
