// Which memory of forward is kept for backward, as a problem without tensors: items are pieces of memory,
// works are what makes them.
//
//   SavingProblem problem;
//   problem.works.push_back({.cost = 100});                          // work 0 makes item 0 from inputs
//   problem.works.push_back({.cost = 5, .needs = {0}});              // work 1 makes item 1 from item 0
//   problem.items.push_back({.bytes = 64, .maker = 0});
//   problem.items.push_back({.bytes = 64, .maker = 1, .used = true});  // backward reads it
//
// A choice says of each work whether backward does it again. Backward then needs the items that it uses and
// those that repeated works need; of these, the items of works that are not repeated are saved, and the
// others are made again. An item that nobody needs is neither saved nor made. Thread safety: that of a
// standard container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::graph {

// What an override says about a work.
enum class SavingRule : std::uint8_t {
  Free,       // what is best
  Save,       // never repeated: what backward needs of it is saved. Also of works that must not be repeated
  Recompute,  // always repeated if backward needs it
};

struct SavingProblem {
  // A piece of memory that a work makes.
  struct Item {
    std::int64_t bytes = 0;
    std::size_t maker = 0;  // the work
    bool used = false;      // backward reads it, even if it repeats nothing
  };
  // In the order of execution: a work needs items of earlier works only.
  struct Work {
    std::int64_t cost = 1;  // of doing it once more; positive
    SavingRule rule = SavingRule::Free;
    std::vector<std::size_t> needs = {};  // items that it reads, each once
  };
  std::vector<Item> items;
  std::vector<Work> works;
};

// A choice and what it amounts to.
struct SavingChoice {
  std::vector<char> repeated;  // by work: backward does it again
  std::vector<char> saved;     // by item
  std::int64_t bytes = 0;      // of the saved items
  std::int64_t cost = 0;       // of the repeated works
  // No choice within the same budget costs less than this.
  double least_cost = 0;

  // How far the cost is from the least one at most, as a fraction of it; 0 if it is the least.
  double gap() const;
};

// Computes what choices amount to. The problem must outlive it.
class SavingChoices {
 public:
  explicit SavingChoices(const SavingProblem& problem);

  // Repeats the works of `wanted` as far as backward needs them, and works with a rule as the rule says; the
  // rules are those of the problem, or others. `least_cost` stays 0.
  SavingChoice of(const std::vector<char>& wanted) const { return of(wanted, rules_); }
  SavingChoice of(const std::vector<char>& wanted, const std::vector<SavingRule>& rules) const;

  // By work, those of the problem.
  const std::vector<SavingRule>& rules() const { return rules_; }

 private:
  const SavingProblem& problem_;
  std::vector<SavingRule> rules_;
  std::vector<std::vector<std::size_t>> made_;  // by work: its items
};

// Repeats as little as the rules allow.
SavingChoice save_all(const SavingProblem& problem);

}  // namespace penstock::graph
