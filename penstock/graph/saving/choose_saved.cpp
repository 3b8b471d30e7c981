#include "penstock/graph/saving/choose_saved.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "penstock/graph/saving/priced_cut.h"

namespace penstock::graph {
namespace {

using Rules = std::vector<SavingRule>;

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// Equal blocks of a model would all change sides at one price, and nothing between none and all of them would
// be found. Slightly different costs let them change one after the other. Never more than the real ones, so
// that bounds stay bounds, and less for early works: what is saved at the end of forward is freed first in
// backward, before the beginning is recomputed.
std::vector<double> costs_of(const SavingProblem& problem, double spread) {
  std::vector<double> costs;
  costs.reserve(problem.works.size());
  const auto count = static_cast<double>(problem.works.size());
  for (std::size_t w = 0; w < problem.works.size(); ++w)
    costs.push_back(static_cast<double>(problem.works[w].cost) *
                    (1 - spread * (count - static_cast<double>(w)) / count));
  return costs;
}

bool is_small(const SavingProblem& problem, const SavingOptions& options) {
  const auto free = std::count_if(problem.works.begin(), problem.works.end(),
                                  [](const auto& work) { return work.rule == SavingRule::Free; });
  return static_cast<std::size_t>(free) <= options.exact_works;
}

class Search {
 public:
  Search(const SavingProblem& problem, std::int64_t budget, const SavingOptions& options)
      : problem_(problem),
        budget_(budget),
        options_(options),
        exact_(is_small(problem, options)),
        cut_(problem, costs_of(problem, exact_ ? 0 : kSpread)) {}

  std::optional<SavingChoice> run() {
    Part root{.rules = cut_.choices().rules()};
    if (!explore(root, kRounds)) return std::nullopt;
    improve(*best_);
    keep(std::move(root));
    // Small problems end by themselves; this many branches keep a pathological one from running for hours.
    const std::size_t limit = exact_ ? 100'000 : options_.branches;
    for (std::size_t branches = 0; !open_.empty() && branches < limit; ++branches) {
      if (is_done(open_.begin()->first)) break;
      branch(open_.extract(open_.begin()).mapped());
    }
    const auto cost = static_cast<double>(best_->cost);
    best_->least_cost = open_.empty() || is_no_better(open_.begin()->first) ? cost : open_.begin()->first;
    return std::move(best_);
  }

 private:
  static constexpr double kSpread = 1e-3;
  static constexpr int kRounds = 40, kRoundsOfBranches = 6;

  // The choices with these rules.
  struct Part {
    Rules rules;
    double bound = 0;           // none of them costs less
    double price = 0;           // that gave the bound; 0: none yet
    std::size_t split = kNone;  // the work to branch on; kNone: the best of them is known
  };

  bool fits(const SavingChoice& choice) const { return choice.bytes <= budget_; }
  // Costs are whole numbers: what costs less costs at least one less.
  bool is_no_better(double bound) const { return bound > static_cast<double>(best_->cost) - 0.5; }
  bool is_done(double bound) const {
    return is_no_better(bound) || (!exact_ && static_cast<double>(best_->cost) <= bound * (1 + options_.gap));
  }
  void offer(const SavingChoice& choice) {
    if (!fits(choice)) return;
    if (!best_ || choice.cost < best_->cost || (choice.cost == best_->cost && choice.bytes < best_->bytes))
      best_ = choice;
  }
  void keep(Part part) {
    if (part.split != kNone && !is_no_better(part.bound)) open_.emplace(part.bound, std::move(part));
  }

  // Finds the bound of a part, and what to branch on. Returns false if no choice of it fits.
  bool explore(Part& part, int rounds) {
    // Two choices on the lower hull of (bytes, cost): one that fits and one that does not.
    SavingChoice large = cut_.choices().of(std::vector<char>(part.rules.size(), 0), part.rules);
    if (fits(large)) {
      offer(large);
      return true;
    }
    const std::int64_t least_cost = large.cost;
    std::optional<SavingChoice> small;
    const auto price_at = [&](double price) {
      PricedChoice best = cut_.solve(part.rules, price);
      const double bound = best.value - price * static_cast<double>(budget_);
      if (bound > part.bound) part.bound = bound;
      if (bound >= part.bound) part.price = price;
      offer(best.choice);
      return best;
    };
    if (part.price > 0) {
      PricedChoice best = price_at(part.price);
      if (fits(best.choice))
        small = std::move(best.choice);
      else
        large = std::move(best.choice);
    }
    if (!small) small = cut_.fewest_bytes(part.rules).choice;
    if (!fits(*small)) return false;
    offer(*small);
    for (int round = 0; round < rounds; ++round) {
      const double more_bytes = static_cast<double>(large.bytes - small->bytes),
                   less_cost = cut_.cost_of(*small) - cut_.cost_of(large);
      if (small->cost == least_cost) return true;
      if (!(less_cost > 0)) break;
      const double price = less_cost / more_bytes,
                   line = cut_.cost_of(large) + price * static_cast<double>(large.bytes);
      PricedChoice best = price_at(price);
      if (best.value >= line - 1e-9 * line) break;  // the two are next to each other on the hull
      if (fits(best.choice) ? best.choice.bytes == small->bytes && best.choice.cost >= small->cost
                            : best.choice.bytes == large.bytes)
        break;  // only rounding is left
      if (fits(best.choice))
        small = std::move(best.choice);
      else
        large = std::move(best.choice);
    }
    part.split = difference(part.rules, *small, large);
    return true;
  }

  // The most expensive free work that one of the two repeats and the other does not. There is one if they
  // differ: of the last work in which they differ, both need the same items.
  std::size_t difference(const Rules& rules, const SavingChoice& small, const SavingChoice& large) const {
    std::size_t found = kNone;
    for (std::size_t w = 0; w < rules.size(); ++w)
      if (small.repeated[w] != large.repeated[w] && rules[w] == SavingRule::Free &&
          (found == kNone || problem_.works[w].cost > problem_.works[found].cost))
        found = w;
    return found;
  }

  void branch(const Part& part) {
    for (const SavingRule rule : {SavingRule::Save, SavingRule::Recompute}) {
      Part half{.rules = part.rules, .bound = part.bound, .price = part.price};
      half.rules[part.split] = rule;
      if (explore(half, kRoundsOfBranches)) keep(std::move(half));
    }
  }

  // Saves more of what a choice repeats as long as there is room, most gain for a byte first.
  void improve(SavingChoice choice) {
    for (int round = 0; round < 4; ++round) {
      std::vector<std::pair<double, std::size_t>> gains;
      const auto without = [&](std::size_t work) {
        std::vector<char> wanted = choice.repeated;
        wanted[work] = 0;
        return cut_.choices().of(wanted);
      };
      for (std::size_t w = 0; w < problem_.works.size(); ++w) {
        if (!choice.repeated[w] || problem_.works[w].rule != SavingRule::Free) continue;
        const SavingChoice tried = without(w);
        if (fits(tried) && tried.cost < choice.cost)
          gains.emplace_back(static_cast<double>(tried.cost - choice.cost) /
                                 static_cast<double>(std::max<std::int64_t>(1, tried.bytes - choice.bytes)),
                             w);
      }
      if (gains.empty()) break;
      std::sort(gains.begin(), gains.end());
      for (const auto& [gain, work] : gains) {
        if (!choice.repeated[work]) continue;
        SavingChoice tried = without(work);
        if (fits(tried) && tried.cost < choice.cost) choice = std::move(tried);
      }
    }
    offer(choice);
  }

  const SavingProblem& problem_;
  const std::int64_t budget_;
  const SavingOptions options_;
  const bool exact_;
  PricedCut cut_;
  std::optional<SavingChoice> best_;
  std::multimap<double, Part> open_;  // by their bounds
};

}  // namespace

std::optional<SavingChoice> choose_saved(const SavingProblem& problem, std::int64_t budget_bytes,
                                         const SavingOptions& options) {
  return Search(problem, budget_bytes, options).run();
}

SavingChoice least_saved(const SavingProblem& problem) {
  PricedCut cut(problem, costs_of(problem, 0));
  SavingChoice least = cut.fewest_bytes(cut.choices().rules()).choice;
  least.least_cost = 0;
  return least;
}

}  // namespace penstock::graph
