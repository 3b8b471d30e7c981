// Plans of trials depend on the seed alone, and are ones that can be judged.
#include "tests/chaos/plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <string>

#include "penstock/errors.h"
#include "tests/chaos/table.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace plan_test {

using chaos::Fault;
using chaos::Plan;

TEST(ChaosPlan, FaultsHaveNamesInTheOrderOfTheEnumeration) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < chaos::all_faults().size(); ++i) {
    const Fault fault = chaos::all_faults()[i];
    EXPECT_EQ(static_cast<std::size_t>(fault), i);
    EXPECT_TRUE(names.insert(chaos::name_of(fault)).second) << chaos::name_of(fault);
    EXPECT_EQ(chaos::fault_named(chaos::name_of(fault)), fault);
  }
  EXPECT_EQ(chaos::all_faults().back(), Fault::HalfOpen) << "a fault has no row";
  EXPECT_EQ(chaos::fault_named("kill"), std::nullopt);
}

TEST(ChaosPlan, RandomPlansCanBeJudged) {
  for (const Fault fault : chaos::all_faults()) {
    std::set<std::string> different;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
      const Plan plan = chaos::plan_of(fault, seed);
      const std::string text = chaos::to_text(plan);
      EXPECT_EQ(text, chaos::to_text(chaos::plan_of(fault, seed)));
      different.insert(text.substr(text.find(':')));
      EXPECT_EQ(plan.fault, fault);
      EXPECT_EQ(plan.seed, seed);
      EXPECT_TRUE(plan.victim == 0 || plan.victim == 1);
      if (!plan.strike_after) {
        EXPECT_GE(plan.strike_step, 1) << text;
        EXPECT_LT(plan.strike_step, plan.steps) << text;
      }
      const chaos::Expectation expected = chaos::expectation_of(plan);
      EXPECT_GT(expected.deadline_s, 0) << text;
      EXPECT_FALSE(expected.must_finish && expected.must_fail) << text;
      const bool can_end_in_an_error = !expected.must_finish && !expected.silent;
      if (can_end_in_an_error && fault != Fault::CheckpointDamaged) {
        EXPECT_FALSE(expected.culprits.empty()) << text;
      }
      if (plan.restarts > 0) {
        EXPECT_NE(plan.start, chaos::Start::Hosts) << text;
      }
    }
    EXPECT_GT(different.size(), 40u) << chaos::name_of(fault) << " has few different trials";
  }
}

TEST(ChaosTable, CountsAndReadsWhatItWrote) {
  using Kind = chaos::TrialResult::Kind;
  const std::vector<chaos::TrialResult> results = {
      {.fault = Fault::KillRank, .seed = 1, .kind = Kind::SameLosses, .seconds = 4.5, .notes = {}},
      {.fault = Fault::KillRank,
       .seed = 2,
       .kind = Kind::Failed,
       .seconds = 9,
       .notes = {"left running: \"x\"\n", "b"}},
      {.fault = Fault::Loss, .seed = 3, .kind = Kind::NamedError, .seconds = 2, .notes = {}},
      {.fault = Fault::Loss, .seed = 4, .kind = Kind::Skipped, .seconds = 0, .notes = {"no namespaces"}}};
  for (const auto& result : results) {
    const chaos::TrialResult again = chaos::parse_line(to_line(result));
    EXPECT_EQ(again.fault, result.fault);
    EXPECT_EQ(again.seed, result.seed);
    EXPECT_EQ(again.kind, result.kind);
    EXPECT_EQ(again.seconds, result.seconds);
    EXPECT_EQ(again.notes, result.notes);
  }
  const std::string markdown = chaos::markdown_table(results);
  EXPECT_TRUE(has_text(markdown, "| `kill-rank` | SIGKILL of a rank | 2 | 1 | 0 | 1 |"));
  EXPECT_TRUE(has_text(markdown, "| 1 | 0 | 1 | 0 |")) << "a skipped trial is none";
  EXPECT_TRUE(has_text(markdown, "| `all` |  | 3 | 1 | 1 | 1 |"));
  EXPECT_EQ(markdown.find("garbage"), std::string::npos);
  EXPECT_TRUE(has_text(chaos::text_table(results),
                       "all                       3            1            1        1        1"));
  for (const char* line :
       {"", "{}", "nonsense", R"({"fault":"kill","seed":1,"end":"failed","seconds":1,"notes":[]})",
        R"({"fault":"loss","seed":1,"end":"well","seconds":1,"notes":[]})"})
    EXPECT_THROW(chaos::parse_line(line), ConfigError) << line;
}

}  // namespace plan_test
}  // namespace penstock::test
