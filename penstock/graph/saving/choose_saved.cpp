#include "penstock/graph/saving/choose_saved.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
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

std::vector<std::int64_t> bytes_of(const SavingProblem& problem) {
  std::vector<std::int64_t> bytes;
  bytes.reserve(problem.items.size());
  for (const SavingProblem::Item& item : problem.items) bytes.push_back(item.bytes);
  return bytes;
}

// The choices with these rules.
struct Part {
  Rules rules;
  double bound = 0;           // none of them costs less
  std::size_t split = kNone;  // the work to branch on; kNone: the best of them is known
  // The prices that gave the bounds, of each relaxation; 0: none yet.
  std::array<double, 2> prices{};
};

// A problem with a budget and prices instead of it. Its bytes may be coarser than those of the problem, so
// that each choice that fits the problem's budget fits this one.
class Relaxation {
 public:
  Relaxation(const SavingProblem& problem, std::vector<double> costs, std::vector<std::int64_t> bytes,
             std::int64_t budget)
      : cut_(problem, std::move(costs), std::move(bytes)), budget_(budget) {}

  const SavingChoices& choices() const { return cut_.choices(); }

  // Two choices next to each other on the lower hull of (bytes, cost), of which one fits. `small` is empty if
  // none fits, `large` if the one of least cost does.
  struct Border {
    std::optional<SavingChoice> small, large;
  };
  // Raises the bound of a part, and offers each choice that it finds to `offer`. `price`: where to begin, and
  // where it ended.
  template <class Offer>
  Border explore(const Rules& rules, int rounds, double& bound, double& price, const Offer& offer) {
    Border border;
    SavingChoice& large = border.large.emplace(choices().of(std::vector<char>(rules.size(), 0), rules));
    const std::int64_t least_cost = large.cost;
    offer(large);
    if (fits(large)) return {.small = std::move(large), .large = std::nullopt};
    const auto solve = [&](double at) {
      PricedChoice best = cut_.solve(rules, at);
      const double found = best.value - at * static_cast<double>(budget_);
      if (found >= bound) {
        bound = found;
        price = at;
      }
      offer(best.choice);
      return best;
    };
    if (price > 0) {
      PricedChoice best = solve(price);
      (fits(best.choice) ? border.small : border.large) = std::move(best.choice);
    }
    if (!border.small) border.small = cut_.fewest_bytes(rules).choice;
    if (!fits(*border.small)) return {.small = std::nullopt, .large = std::move(border.large)};
    offer(*border.small);
    for (int round = 0; round < rounds; ++round) {
      const SavingChoice &fitting = *border.small, &above = *border.large;
      if (fitting.cost == least_cost) return {.small = std::move(border.small), .large = std::nullopt};
      const double less_cost = cut_.cost_of(fitting) - cut_.cost_of(above);
      if (!(less_cost > 0)) break;
      const std::int64_t low = cut_.bytes_of(fitting), high = cut_.bytes_of(above);
      const double at = less_cost / static_cast<double>(high - low),
                   line = cut_.cost_of(above) + at * static_cast<double>(high);
      PricedChoice best = solve(at);
      if (best.value >= line - 1e-9 * line) break;  // the two are next to each other on the hull
      const std::int64_t bytes = cut_.bytes_of(best.choice);
      if (fits(best.choice) ? bytes == low && best.choice.cost >= fitting.cost : bytes == high)
        break;  // only rounding is left
      (fits(best.choice) ? border.small : border.large) = std::move(best.choice);
    }
    return border;
  }

 private:
  bool fits(const SavingChoice& choice) const { return cut_.bytes_of(choice) <= budget_; }

  PricedCut cut_;
  std::int64_t budget_;
};

// Large items have sizes with a large common divisor, tensors of equal blocks; what they take is a multiple
// of it, and the budget for them may be rounded down to one. Small items are left out. Returns the relaxation
// that this tightens most; nullopt if there is none.
std::optional<Relaxation> rounded_relaxation(const SavingProblem& problem, const std::vector<double>& costs,
                                             std::int64_t budget) {
  std::map<std::int64_t, std::int64_t, std::greater<>> total;  // by size, the bytes of all items of that size
  for (const SavingProblem::Item& item : problem.items) total[item.bytes] += item.bytes;
  std::int64_t below = 0, divisor = 0, best_gain = 0, least_size = 0, rounded = 0;
  for (const auto& [size, bytes] : total) below += bytes;
  for (const auto& [size, bytes] : total) {
    if (size == 0) break;
    below -= bytes;
    divisor = std::gcd(divisor, size);
    if (const std::int64_t gain = budget % divisor - below; gain > best_gain) {
      best_gain = gain;
      least_size = size;
      rounded = budget - budget % divisor;
    }
  }
  if (best_gain <= 0) return std::nullopt;
  std::vector<std::int64_t> bytes = bytes_of(problem);
  for (std::int64_t& each : bytes)
    if (each < least_size) each = 0;
  return std::optional<Relaxation>(std::in_place, problem, costs, std::move(bytes), rounded);
}

class Search {
 public:
  Search(const SavingProblem& problem, std::int64_t budget, const SavingOptions& options)
      : problem_(problem),
        budget_(budget),
        options_(options),
        exact_(is_small(problem, options)),
        relaxation_(problem, costs_of(problem, exact_ ? 0 : kSpread), bytes_of(problem), budget),
        rounded_(rounded_relaxation(problem, costs_of(problem, exact_ ? 0 : kSpread), budget)) {}

  std::optional<SavingChoice> run() {
    Part root{.rules = relaxation_.choices().rules()};
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
    const auto take = [&](const SavingChoice& choice) { offer(choice); };
    const Relaxation::Border border =
        relaxation_.explore(part.rules, rounds, part.bound, part.prices[0], take);
    if (!border.small) return false;
    if (!border.large) return true;  // the best of the part
    part.split = difference(part.rules, *border.small, *border.large);
    if (!rounded_) return true;
    const Relaxation::Border rough = rounded_->explore(part.rules, rounds, part.bound, part.prices[1], take);
    return rough.small.has_value();
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
      Part half{.rules = part.rules, .bound = part.bound, .prices = part.prices};
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
        return relaxation_.choices().of(wanted);
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
  Relaxation relaxation_;
  std::optional<Relaxation> rounded_;
  std::optional<SavingChoice> best_;
  std::multimap<double, Part> open_;  // by their bounds
};

}  // namespace

std::optional<SavingChoice> choose_saved(const SavingProblem& problem, std::int64_t budget_bytes,
                                         const SavingOptions& options) {
  return Search(problem, budget_bytes, options).run();
}

SavingChoice least_saved(const SavingProblem& problem) {
  PricedCut cut(problem, costs_of(problem, 0), bytes_of(problem));
  SavingChoice least = cut.fewest_bytes(cut.choices().rules()).choice;
  least.least_cost = 0;
  return least;
}

}  // namespace penstock::graph
