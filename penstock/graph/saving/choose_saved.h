// Chooses what is saved under a budget: the choice of least cost whose saved items fit.
//
//   const std::optional<SavingChoice> choice = choose_saved(problem, 1 << 20);
//   if (!choice) ... least_saved(problem).bytes is the smallest budget that can be met
//
// The method. With a price on each saved byte instead of a budget, the best choice is a minimum cut, and what
// it costs is a lower bound for every choice within the budget (Lagrange). The price at which the best choice
// just fits is found by secants. What is left between that choice and the bound is closed by branching on
// single works. With few works, the search ends with the optimum (`least_cost` is then the cost); with many,
// at a gap of SavingOptions::gap or after SavingOptions::branches, and SavingChoice::gap() says where.
//
// Deterministic: the same problem has the same choice in every process.
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "penstock/graph/saving/saving_problem.h"

namespace penstock::graph {

struct SavingOptions {
  // Up to so many free works, the optimum itself is found.
  std::size_t exact_works = 48;
  // Otherwise the search ends at this gap, or after so many branches.
  double gap = 0.01;
  std::size_t branches = 200;
};

// The choice of least cost among those with at most `budget_bytes`; nullopt if there is none.
std::optional<SavingChoice> choose_saved(const SavingProblem& problem, std::int64_t budget_bytes,
                                         const SavingOptions& options = {});

// Saves as little as the rules allow, whatever it costs.
SavingChoice least_saved(const SavingProblem& problem);

}  // namespace penstock::graph
