#include "penstock/graph/saving/saving_problem.h"

#include <algorithm>
#include <limits>

namespace penstock::graph {

double SavingChoice::gap() const {
  const auto mine = static_cast<double>(cost);
  if (mine <= least_cost) return 0;
  return least_cost > 0 ? (mine - least_cost) / least_cost : std::numeric_limits<double>::infinity();
}

SavingChoices::SavingChoices(const SavingProblem& problem) : problem_(problem), made_(problem.works.size()) {
  rules_.reserve(problem.works.size());
  for (const SavingProblem::Work& work : problem.works) rules_.push_back(work.rule);
  for (std::size_t i = 0; i < problem.items.size(); ++i) made_[problem.items[i].maker].push_back(i);
}

SavingChoice SavingChoices::of(const std::vector<char>& wanted, const std::vector<SavingRule>& rules) const {
  SavingChoice choice;
  choice.repeated.assign(problem_.works.size(), 0);
  choice.saved.assign(problem_.items.size(), 0);
  std::vector<char> needed(problem_.items.size(), 0);
  for (std::size_t i = 0; i < needed.size(); ++i) needed[i] = problem_.items[i].used ? 1 : 0;
  // From last to first: what needs an item comes after what makes it.
  for (std::size_t w = problem_.works.size(); w-- > 0;) {
    const bool is_needed =
        std::any_of(made_[w].begin(), made_[w].end(), [&](std::size_t item) { return needed[item] != 0; });
    if (!is_needed) continue;
    if (rules[w] == SavingRule::Recompute || (rules[w] == SavingRule::Free && wanted[w] != 0)) {
      choice.repeated[w] = 1;
      choice.cost += problem_.works[w].cost;
      for (const std::size_t item : problem_.works[w].needs) needed[item] = 1;
      continue;
    }
    for (const std::size_t item : made_[w])
      if (needed[item]) {
        choice.saved[item] = 1;
        choice.bytes += problem_.items[item].bytes;
      }
  }
  return choice;
}

SavingChoice save_all(const SavingProblem& problem) {
  return SavingChoices(problem).of(std::vector<char>(problem.works.size(), 0));
}

}  // namespace penstock::graph
