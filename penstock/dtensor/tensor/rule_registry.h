// Where rules are found, and how the families of this folder add theirs. Private to this folder.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/dtensor/tensor/sharding_rule.h"

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
  void add(std::initializer_list<std::string_view> names, const ShardingRule& rule, const RuleOptions& options = {});
  void handle(const std::vector<std::string>& names, const ShardingHandler& handler);

  void put(const std::string& op, RegisteredRule rule, bool replace);
  // By the whole name, then without the overload, then without the underscore of in-place forms.
  const RegisteredRule* find(const std::string& op) const;
  std::vector<std::string> names() const;

 private:
  // Replaced rules are kept: a thread may be using one.
  std::map<std::string, std::vector<std::unique_ptr<RegisteredRule>>, std::less<>> rules_;
};

// The rule of an operator by traits.name; null when there is none. Lives as long as the process.
const RegisteredRule* find_rule(const std::string& op);
// Rises with every registration: caches of decisions compare it.
std::uint64_t rule_generation();

// Notes that a call came to a rule. Done when a decision is made, and once per thread for a handler: not for every call.
void note_asked(const RegisteredRule& rule);
// The names noted since the last time by any thread, sorted: tests find the rules that nobody asks.
std::vector<std::string> take_asked_rules();

// One function a file.
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
