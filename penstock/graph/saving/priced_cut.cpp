#include "penstock/graph/saving/priced_cut.h"

#include <utility>

namespace penstock::graph {

PricedCut::PricedCut(const SavingProblem& problem, std::vector<double> costs, std::vector<std::int64_t> bytes)
    : problem_(problem),
      choices_(problem),
      costs_(std::move(costs)),
      bytes_(std::move(bytes)),
      network_(problem.works.size() + problem.items.size() + 2) {
  const auto always = [&](std::size_t from, std::size_t to) {
    network_.set_capacity(network_.add_edge(from, to), MaxFlow::kUnlimited);
  };
  for (std::size_t w = 0; w < problem.works.size(); ++w) {
    repeat_edges_.push_back(network_.add_edge(work_vertex(w), sink()));
    // A work that is repeated needs its items.
    for (const std::size_t item : problem.works[w].needs) always(work_vertex(w), item_vertex(item));
  }
  for (std::size_t i = 0; i < problem.items.size(); ++i) {
    // Saved: needed, and the maker is not repeated.
    save_edges_.push_back(network_.add_edge(item_vertex(i), work_vertex(problem.items[i].maker)));
    if (problem.items[i].used) always(0, item_vertex(i));
  }
}

double PricedCut::cost_of(const SavingChoice& choice) const {
  double cost = 0;
  for (std::size_t w = 0; w < choice.repeated.size(); ++w)
    if (choice.repeated[w]) cost += costs_[w];
  return cost;
}

std::int64_t PricedCut::bytes_of(const SavingChoice& choice) const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < choice.saved.size(); ++i)
    if (choice.saved[i]) bytes += bytes_[i];
  return bytes;
}

PricedChoice PricedCut::solve(const std::vector<SavingRule>& rules, double price, double cost_factor) {
  for (std::size_t w = 0; w < rules.size(); ++w)
    network_.set_capacity(repeat_edges_[w],
                          rules[w] == SavingRule::Save ? MaxFlow::kUnlimited : cost_factor * costs_[w]);
  for (std::size_t i = 0; i < save_edges_.size(); ++i) {
    network_.set_capacity(save_edges_[i], rules[problem_.items[i].maker] == SavingRule::Recompute
                                              ? MaxFlow::kUnlimited
                                              : price * static_cast<double>(bytes_[i]));
  }
  PricedChoice best;
  best.value = network_.run(0, sink());
  std::vector<char> wanted(rules.size(), 0);
  for (std::size_t w = 0; w < rules.size(); ++w) wanted[w] = network_.reached()[work_vertex(w)];
  best.choice = choices_.of(wanted, rules);
  return best;
}

PricedChoice PricedCut::solve(const std::vector<SavingRule>& rules, double price) {
  return solve(rules, price, 1);
}

PricedChoice PricedCut::fewest_bytes(const std::vector<SavingRule>& rules) { return solve(rules, 1, 0); }

}  // namespace penstock::graph
