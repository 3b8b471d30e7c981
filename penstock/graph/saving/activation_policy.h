// Overrides of what is saved, by module: lines like "blocks.*.attention: save".
//
//   const ActivationPolicy policy = parse_activation_policy({"blocks.*.attention: save", "*: recompute"},
//                                                           "training.activation_policy");
//   policy.rule_of("blocks.3.attention.query");     // SavingRule::Save
//   policy.rule_of("blocks.3.feed");                // SavingRule::Recompute
//
// A pattern names modules by their path. It matches a module and everything inside it; in a component, `*`
// stands for any characters, and the pattern `*` alone for the whole model. The first line that matches
// decides; where none does, the budget decides.
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/graph/saving/saving_problem.h"

namespace penstock::graph {

class ActivationPolicy {
 public:
  struct Line {
    std::string pattern;
    SavingRule rule = SavingRule::Free;
  };

  ActivationPolicy() = default;
  explicit ActivationPolicy(std::vector<Line> lines) : lines_(std::move(lines)) {}

  bool empty() const { return lines_.empty(); }
  // The first line that matches a module; -1: none.
  int line_of(std::string_view module) const;
  SavingRule rule_of(std::string_view module) const;
  // Returns an empty string if each pattern matches one of the modules, otherwise what is wrong with the
  // first that does not, with the nearest module. `what` names the setting.
  std::string unmatched(const std::vector<std::string>& modules, std::string_view what) const;

 private:
  std::vector<Line> lines_;
};

// Throws ConfigError that begins with `what` for a line that is not "PATTERN: save" or "PATTERN: recompute".
ActivationPolicy parse_activation_policy(const std::vector<std::string>& lines, std::string_view what);

// Whether a pattern matches a module or a module around it.
bool matches_module(std::string_view pattern, std::string_view module);

}  // namespace penstock::graph
