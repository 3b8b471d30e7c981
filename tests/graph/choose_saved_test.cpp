// What is saved under a budget, without tensors: against all choices of small problems, and by its bound on
// large ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/saving/activation_budget.h"
#include "penstock/graph/saving/activation_policy.h"
#include "penstock/graph/saving/choose_saved.h"
#include "penstock/graph/saving/max_flow.h"
#include "tests/has_text.h"

namespace penstock::graph {
namespace choose_saved_test {
namespace {

using penstock::test::has_text;

unsigned problems() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 300;
}

SavingProblem random_problem(unsigned seed, std::size_t works) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  SavingProblem problem;
  const std::size_t spread = 1 + below(1000), sizes = 1 + below(1000);
  for (std::size_t w = 0; w < works; ++w) {
    SavingProblem::Work work;
    work.cost = 1 + static_cast<std::int64_t>(below(spread));
    if (below(8) == 0) work.rule = below(2) == 0 ? SavingRule::Save : SavingRule::Recompute;
    for (std::size_t k = below(4); k-- > 0 && !problem.items.empty();) {
      // Mostly recent ones, as in a graph.
      const std::size_t back =
          below(4) == 0 ? problem.items.size() : std::min<std::size_t>(3, problem.items.size());
      const std::size_t item = problem.items.size() - 1 - below(back);
      if (std::find(work.needs.begin(), work.needs.end(), item) == work.needs.end())
        work.needs.push_back(item);
    }
    problem.works.push_back(std::move(work));
    for (std::size_t made = below(5) == 0 ? 2 : 1; made-- > 0;)
      problem.items.push_back(
          {.bytes = static_cast<std::int64_t>(below(sizes)), .maker = w, .used = below(2) == 0});
  }
  return problem;
}

// All choices, by brute force.
std::vector<SavingChoice> all_choices(const SavingProblem& problem) {
  const SavingChoices choices(problem);
  std::vector<SavingChoice> all;
  for (std::size_t mask = 0; mask < std::size_t{1} << problem.works.size(); ++mask) {
    std::vector<char> wanted(problem.works.size(), 0);
    bool is_new = true;
    for (std::size_t w = 0; w < wanted.size(); ++w) {
      wanted[w] = (mask >> w & 1U) != 0;
      is_new &= !wanted[w] || problem.works[w].rule == SavingRule::Free;
    }
    if (is_new) all.push_back(choices.of(wanted));
  }
  return all;
}

std::optional<std::int64_t> least_cost(const std::vector<SavingChoice>& all, std::int64_t budget) {
  std::optional<std::int64_t> least;
  for (const SavingChoice& choice : all)
    if (choice.bytes <= budget && (!least || choice.cost < *least)) least = choice.cost;
  return least;
}

// That a choice is one: whatever backward reads is saved or made, and the sums are right.
void expect_consistent(const SavingProblem& problem, const SavingChoice& choice) {
  std::int64_t bytes = 0, cost = 0;
  const auto available = [&](std::size_t item) {
    return choice.saved[item] != 0 || choice.repeated[problem.items[item].maker] != 0;
  };
  for (std::size_t i = 0; i < problem.items.size(); ++i) {
    bytes += choice.saved[i] ? problem.items[i].bytes : 0;
    EXPECT_FALSE(choice.saved[i] && choice.repeated[problem.items[i].maker]);
    EXPECT_FALSE(choice.saved[i] && problem.works[problem.items[i].maker].rule == SavingRule::Recompute);
    if (problem.items[i].used) {
      EXPECT_TRUE(available(i)) << "item " << i;
    }
  }
  for (std::size_t w = 0; w < problem.works.size(); ++w) {
    if (!choice.repeated[w]) continue;
    cost += problem.works[w].cost;
    EXPECT_NE(problem.works[w].rule, SavingRule::Save);
    for (const std::size_t item : problem.works[w].needs) EXPECT_TRUE(available(item)) << "item " << item;
  }
  EXPECT_EQ(choice.bytes, bytes);
  EXPECT_EQ(choice.cost, cost);
}

}  // namespace

TEST(MaxFlow, OfANetworkByHand) {
  MaxFlow network(6);
  const auto edge = [&](std::size_t from, std::size_t to, double capacity) {
    network.set_capacity(network.add_edge(from, to), capacity);
  };
  edge(0, 1, 16);
  edge(0, 2, 13);
  edge(1, 2, 10);
  edge(2, 1, 4);
  edge(1, 3, 12);
  edge(3, 2, 9);
  edge(2, 4, 14);
  edge(4, 3, 7);
  edge(3, 5, 20);
  edge(4, 5, 4);
  for (int run = 0; run < 2; ++run) {
    EXPECT_EQ(network.run(0, 5), 23);
    EXPECT_EQ(network.reached(), (std::vector<char>{1, 1, 1, 0, 1, 0}));
  }
}

TEST(ChooseSaved, ByHand) {
  // A chain of an expensive and a cheap work; backward reads both results.
  SavingProblem problem;
  problem.works = {{.cost = 100}, {.cost = 5, .needs = {0}}};
  problem.items = {{.bytes = 64, .maker = 0, .used = true}, {.bytes = 64, .maker = 1, .used = true}};
  EXPECT_EQ(choose_saved(problem, 128)->cost, 0);
  const std::optional<SavingChoice> half = choose_saved(problem, 127);
  ASSERT_TRUE(half);
  EXPECT_EQ(half->cost, 5);
  EXPECT_EQ(half->bytes, 64);
  EXPECT_EQ(half->saved, (std::vector<char>{1, 0}));
  EXPECT_EQ(half->repeated, (std::vector<char>{0, 1}));
  EXPECT_EQ(choose_saved(problem, 63)->cost, 105);
  // The first one must not be done twice.
  problem.works[0].rule = SavingRule::Save;
  EXPECT_FALSE(choose_saved(problem, 63));
  EXPECT_EQ(least_saved(problem).bytes, 64);
  // The second one always is.
  problem.works[1].rule = SavingRule::Recompute;
  EXPECT_EQ(save_all(problem).cost, 5);
  EXPECT_EQ(choose_saved(problem, 1 << 20)->cost, 5);
}

TEST(ChooseSaved, IsTheBestOfAllChoices) {
  std::size_t between = 0;
  for (unsigned seed = 0; seed < problems(); ++seed) {
    SCOPED_TRACE("problem " + std::to_string(seed));
    const SavingProblem problem = random_problem(seed, 2 + seed % 9);
    const std::vector<SavingChoice> all = all_choices(problem);
    std::vector<std::int64_t> budgets{0};
    for (const SavingChoice& choice : all) budgets.push_back(choice.bytes);
    std::sort(budgets.begin(), budgets.end());
    budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
    EXPECT_EQ(least_saved(problem).bytes,
              std::min_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
                return a.bytes < b.bytes;
              })->bytes);
    EXPECT_EQ(save_all(problem).cost, least_cost(all, std::numeric_limits<std::int64_t>::max()));
    // At each number of bytes that some choice takes, and just below.
    const std::size_t every = 1 + budgets.size() / 24;
    for (std::size_t i = 0; i < budgets.size(); i += every)
      for (const std::int64_t budget : {budgets[i], budgets[i] - 1}) {
        const std::optional<std::int64_t> expected = least_cost(all, budget);
        const std::optional<SavingChoice> choice = choose_saved(problem, budget);
        ASSERT_EQ(choice.has_value(), expected.has_value()) << "budget " << budget;
        if (!choice) continue;
        EXPECT_LE(choice->bytes, budget);
        EXPECT_EQ(choice->cost, *expected) << "budget " << budget;
        EXPECT_EQ(choice->gap(), 0);
        expect_consistent(problem, *choice);
        between +=
            choice->cost > save_all(problem).cost && choice->bytes > least_saved(problem).bytes ? 1 : 0;
        // As a large problem: within its gap of the optimum, and its bound is one.
        const std::optional<SavingChoice> fast = choose_saved(problem, budget, {.exact_works = 0});
        ASSERT_TRUE(fast);
        expect_consistent(problem, *fast);
        EXPECT_LE(fast->bytes, budget);
        EXPECT_LE(fast->least_cost, static_cast<double>(*expected) * (1 + 1e-9));
        EXPECT_LE(static_cast<double>(fast->cost), static_cast<double>(*expected) * (1 + fast->gap()) + 1e-6);
      }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(between, problems());
}

TEST(ChooseSaved, LargeProblemsAreWithinTwoPercent) {
  // Equal blocks in a chain, as in a model: projections are expensive, what follows them is cheap.
  for (const std::size_t blocks : {12U, 48U}) {
    SavingProblem problem;
    const auto add = [&](std::int64_t cost, std::int64_t bytes, std::vector<std::size_t> needs, bool used) {
      problem.works.push_back({.cost = cost, .needs = std::move(needs)});
      problem.items.push_back({.bytes = bytes, .maker = problem.works.size() - 1, .used = used});
      return problem.items.size() - 1;
    };
    std::size_t x = add(300, 1000, {}, true);
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t norm = add(2100, 1000, {x}, true), q = add(9000, 1000, {norm}, true),
                        k = add(9000, 1000, {norm}, true), v = add(9000, 1000, {norm}, true),
                        scores = add(5000, 4000, {q, k}, false), chances = add(8000, 4000, {scores}, true),
                        mixed = add(5200, 1000, {chances, v}, true), out = add(9000, 1000, {mixed}, false),
                        y = add(2000, 1000, {x, out}, true), second = add(2100, 1000, {y}, true),
                        up = add(36000, 4000, {second}, true), act = add(8500, 4000, {up}, true),
                        down = add(36000, 1000, {act}, false);
      x = add(2000, 1000, {y, down}, true);
    }
    const SavingChoice all = save_all(problem);
    EXPECT_EQ(all.cost, 0);
    std::int64_t before = std::numeric_limits<std::int64_t>::max();
    for (const double fraction : {0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99}) {
      SCOPED_TRACE(std::to_string(blocks) + " blocks, " + std::to_string(fraction));
      const auto budget = static_cast<std::int64_t>(fraction * static_cast<double>(all.bytes));
      const std::optional<SavingChoice> choice = choose_saved(problem, budget);
      ASSERT_TRUE(choice);
      expect_consistent(problem, *choice);
      EXPECT_LE(choice->bytes, budget);
      EXPECT_LE(choice->gap(), 0.02);
      EXPECT_GT(choice->cost, 0);
      // More room costs no more, as far as the choices are optimal.
      EXPECT_LE(static_cast<double>(choice->cost), 1.02 * static_cast<double>(before));
      before = choice->cost;
      const std::optional<SavingChoice> again = choose_saved(problem, budget);
      EXPECT_EQ(again->repeated, choice->repeated);
    }
  }
}

TEST(ChooseSaved, LargeRandomProblemsAreWithinTheirGap) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("problem " + std::to_string(seed));
    const SavingProblem problem = random_problem(seed, 400);
    const std::int64_t all = save_all(problem).bytes, least = least_saved(problem).bytes;
    for (const std::int64_t budget : {least, least + (all - least) / 3, least + 4 * (all - least) / 5}) {
      const std::optional<SavingChoice> choice = choose_saved(problem, budget);
      ASSERT_TRUE(choice);
      expect_consistent(problem, *choice);
      EXPECT_LE(choice->bytes, budget);
      EXPECT_LE(choice->gap(), 0.02);
    }
  }
}

TEST(ActivationBudget, FractionsAndBytes) {
  EXPECT_EQ(parse_activation_budget("0.3", "x").fraction, 0.3);
  EXPECT_TRUE(parse_activation_budget("1", "x").saves_all());
  EXPECT_FALSE(parse_activation_budget("0", "x").saves_all());
  EXPECT_EQ(parse_activation_budget("1.5 GiB", "x").bytes, 3LL << 29);
  EXPECT_EQ(parse_activation_budget("64K", "x").bytes, 64 << 10);
  EXPECT_EQ(parse_activation_budget("0 B", "x").bytes, 0);
  EXPECT_EQ(parse_activation_budget("0.5", "x").bytes_of(1001, 7), 500);
  EXPECT_EQ(parse_activation_budget("0", "x").bytes_of(1001, 7), 7);
  EXPECT_EQ(parse_activation_budget("2 KiB", "x").bytes_of(1001, 7), 2048);
  for (const char* text : {"", "2", "-0.1", "nan", "1.5 GiC", "half", "512"}) {
    SCOPED_TRACE(text);
    try {
      parse_activation_budget(text, "training.activation_budget");
      ADD_FAILURE() << "was accepted";
    } catch (const ConfigError& error) {
      EXPECT_TRUE(has_text(error.what(), "training.activation_budget: got \"")) << error.what();
      EXPECT_TRUE(has_text(error.what(), "1.5 GiB")) << error.what();
    }
  }
}

TEST(ActivationPolicy, PatternsMatchModulesAndWhatIsInside) {
  EXPECT_TRUE(matches_module("blocks.*.attention", "blocks.3.attention"));
  EXPECT_TRUE(matches_module("blocks.*.attention", "blocks.3.attention.query"));
  EXPECT_FALSE(matches_module("blocks.*.attention", "blocks.3"));
  EXPECT_FALSE(matches_module("blocks.*.attention", "blocks.3.feed.attention"));
  EXPECT_TRUE(matches_module("blocks.1*", "blocks.12.feed"));
  EXPECT_FALSE(matches_module("blocks.1*", "blocks.21.feed"));
  EXPECT_TRUE(matches_module("*.*n*n", "blocks.attention"));
  EXPECT_TRUE(matches_module("*", ""));
  EXPECT_FALSE(matches_module("head", ""));
  const ActivationPolicy policy =
      parse_activation_policy({"blocks.*.attention: save", "blocks: Recompute", "*:save"}, "x");
  EXPECT_EQ(policy.rule_of("blocks.0.attention.key"), SavingRule::Save);
  EXPECT_EQ(policy.rule_of("blocks.0.feed"), SavingRule::Recompute);
  EXPECT_EQ(policy.rule_of("head"), SavingRule::Save);
  EXPECT_EQ(parse_activation_policy({"head: save"}, "x").rule_of("embed"), SavingRule::Free);
}

TEST(ActivationPolicy, WrongLinesAndPatternsWithoutModulesAreNamed) {
  const auto refusal = [](const std::string& line) -> std::string {
    try {
      parse_activation_policy({line}, "training.activation_policy");
    } catch (const ConfigError& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_TRUE(has_text(refusal("blocks: sav"), "did you mean \"blocks: save\"?")) << refusal("blocks: sav");
  EXPECT_TRUE(has_text(refusal("blocks"), "training.activation_policy: got \"blocks\""));
  EXPECT_TRUE(has_text(refusal(": save"), "PATTERN: recompute"));
  const std::vector<std::string> modules{"embed", "blocks.0.attention.query", "blocks.1.feed", "head"};
  const auto unmatched = [&](const std::string& line) {
    return parse_activation_policy({"embed: save", line}, "x")
        .unmatched(modules, "training.activation_policy");
  };
  EXPECT_EQ(unmatched("blocks.*.feed: save"), "");
  EXPECT_EQ(unmatched("*: save"), "");
  EXPECT_TRUE(has_text(unmatched("blocks.*.atention: save"), "did you mean \"blocks.*.attention\"?"))
      << unmatched("blocks.*.atention: save");
  EXPECT_TRUE(has_text(unmatched("blocks.*.atention: save"), "blocks, embed, head"));
}

}  // namespace choose_saved_test
}  // namespace penstock::graph
