// The best choice if each saved byte has a price: a minimum cut.
//
//   PricedCut cut(problem, costs, bytes);
//   const PricedChoice best = cut.solve(rules, 0.5);    // a byte costs as much as half a unit of work
//   best.value                                          // cost + 0.5 * bytes of the best choice
//
// Private to this folder. Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/graph/saving/max_flow.h"
#include "penstock/graph/saving/saving_problem.h"

namespace penstock::graph {

struct PricedChoice {
  SavingChoice choice;
  double value = 0;  // cost, by the costs of the cut, plus price: no choice has less
};

class PricedCut {
 public:
  // `costs` of the works and `bytes` of the items: in place of their own. The problem must outlive the cut.
  PricedCut(const SavingProblem& problem, std::vector<double> costs, std::vector<std::int64_t> bytes);

  // By these costs and bytes.
  double cost_of(const SavingChoice& choice) const;
  std::int64_t bytes_of(const SavingChoice& choice) const;
  const SavingChoices& choices() const { return choices_; }

  // `rules`: of the works, in place of their own.
  PricedChoice solve(const std::vector<SavingRule>& rules, double price);
  // The fewest bytes, whatever they cost.
  PricedChoice fewest_bytes(const std::vector<SavingRule>& rules);

 private:
  // Vertices: the source; works, which are on its side if they are repeated; items, which are on its side if
  // they are needed; the sink.
  std::size_t work_vertex(std::size_t work) const { return 1 + work; }
  std::size_t item_vertex(std::size_t item) const { return 1 + problem_.works.size() + item; }
  std::size_t sink() const { return 1 + problem_.works.size() + problem_.items.size(); }

  PricedChoice solve(const std::vector<SavingRule>& rules, double price, double cost_factor);

  const SavingProblem& problem_;
  const SavingChoices choices_;
  const std::vector<double> costs_;
  const std::vector<std::int64_t> bytes_;
  MaxFlow network_;
  std::vector<std::size_t> repeat_edges_;  // by work: what repeating it costs
  std::vector<std::size_t> save_edges_;    // by item: what saving it costs
};

}  // namespace penstock::graph
