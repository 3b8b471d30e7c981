#include "penstock/models/language/loss_totals.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "penstock/step_context.h"

namespace penstock::models {
namespace {

// Bounds the memory of a stage whose losses nobody takes.
constexpr std::size_t kMostForwards = 4096;

struct SumOfLosses {
  std::string name;
  double weight = 0;
  std::vector<at::Tensor> terms;
};

void add_term(std::vector<SumOfLosses>& sums, const AuxiliaryLoss& loss) {
  auto found =
      std::find_if(sums.begin(), sums.end(), [&](const SumOfLosses& each) { return each.name == loss.name; });
  if (found == sums.end()) found = sums.insert(sums.end(), {loss.name, loss.weight, {}});
  found->terms.push_back(loss.value);
}

}  // namespace

void LossTotals::add(const std::vector<AuxiliaryLoss>& losses) {
  const auto context = StepContext::current();
  if (!context->running || context->trial || context->recompute || context->recorded || context->captured)
    return;
  pending_[{context->step, context->microbatch.value_or(0)}] = losses;
  if (pending_.size() >= kMostForwards) fold();
}

void LossTotals::fold() {
  const at::NoGradGuard no_grad;
  std::vector<SumOfLosses> sums;
  for (const AuxiliaryLoss& loss : folded_) add_term(sums, loss);
  for (const auto& [forward, losses] : pending_)
    for (const AuxiliaryLoss& loss : losses) add_term(sums, loss);
  folded_.clear();
  for (const SumOfLosses& sum : sums) {
    std::vector<at::Tensor> terms;
    for (const at::Tensor& term : sum.terms) terms.push_back(term.to(at::kDouble));
    folded_.push_back({sum.name, at::stack(terms).sum(), sum.weight});
  }
  pending_.clear();
}

std::vector<AuxiliaryLoss> LossTotals::take() {
  fold();
  return std::exchange(folded_, {});
}

}  // namespace penstock::models
