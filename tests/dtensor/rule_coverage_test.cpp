// Every sharding rule is checked by one of the programs of this folder: they write lists, and this one reads
// them.
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/dtensor/tensor/rule_registry.h"

namespace penstock {
namespace rule_coverage_test {

using Names = std::set<std::string>;

// Whether an operator is decomposed into others, which have rules of their own. One that also has a kernel is
// not.
bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

// The rules that calls can reach: the rule of an operator that this LibTorch does not have is skipped.
Names reachable_rules() {
  Names rules;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || decomposes(*op)) continue;
    if (const detail::RegisteredRule* rule = detail::find_rule(c10::toString(name))) rules.insert(rule->name);
  }
  return rules;
}

// Reads the files in a colon-separated list of paths.
Names names_in(const std::string& paths) {
  Names names;
  std::stringstream all(paths);
  for (std::string path; std::getline(all, path, ':');) {
    std::ifstream file(path);
    if (!file)
      throw std::runtime_error(
          path +
          ": no list of checked rules; run the test programs first (ctest -R rule_coverage_test does)");
    for (std::string name; std::getline(file, name);) names.insert(name);
  }
  return names;
}

Names missing(const Names& wanted, const Names& found) {
  Names result;
  for (const std::string& name : wanted)
    if (!found.count(name)) result.insert(name);
  return result;
}

TEST(RuleCoverage, EveryRuleIsChecked) {
  const char* lists = std::getenv("PENSTOCK_RULE_LISTS");
  if (!lists) GTEST_SKIP() << "PENSTOCK_RULE_LISTS names no lists: run with ctest";
  const Names rules = reachable_rules();
  const Names unchecked = missing(rules, names_in(lists));
  EXPECT_TRUE(unchecked.empty()) << unchecked.size() << " of " << rules.size()
                                 << " rules that no test has checked on distributed tensors:\n  "
                                 << fmt::format("{}", fmt::join(unchecked, "\n  "));
}

// The test above can fail: a new rule is expected, and reported as missing.
TEST(RuleCoverage, ANewRuleIsMissing) {
  const Names before = reachable_rules();
  EXPECT_GT(before.size(), 300u);
  EXPECT_TRUE(before.count("aten::mm"));
  EXPECT_FALSE(before.count("aten::reshape")) << "decomposed into views and copies";
  EXPECT_FALSE(before.count("aten::cholesky_inverse"));
  register_sharding_rule("aten::cholesky_inverse", replicate_all);
  EXPECT_EQ(missing(reachable_rules(), before), (Names{"aten::cholesky_inverse"}));
  EXPECT_THROW(names_in("/nowhere/list"), std::runtime_error);
}

}  // namespace rule_coverage_test
}  // namespace penstock
