#include "penstock/graph/wrap/function_form.h"

#include <numeric>
#include <utility>

namespace penstock::graph {

FunctionForm::FunctionForm(Function function, Values inputs, AnalyzeOptions options, ViewAndMutationMeta meta)
    : function_(std::move(function)),
      inputs_(std::move(inputs)),
      options_(std::move(options)),
      meta_(std::move(meta)),
      original_(inputs_.size()) {
  std::iota(original_.begin(), original_.end(), std::size_t{0});
}

FunctionForm::FunctionForm(Function function, Values inputs, AnalyzeOptions options)
    : FunctionForm(std::move(function), std::move(inputs), std::move(options), {}) {
  meta_ = analyze(function_, inputs_, options_);
}

std::string FunctionForm::name_of(std::size_t input) const {
  return convention().names.empty() ? "input " + std::to_string(original_[input])
                                    : convention().name_of(input);
}

void FunctionForm::replace(Function function, Values inputs, Convention convention,
                           const std::vector<std::size_t>& came_from) {
  function_ = std::move(function);
  inputs_ = std::move(inputs);
  options_.convention = std::move(convention);
  std::vector<std::size_t> original;
  for (const std::size_t input : came_from) original.push_back(original_[input]);
  original_ = std::move(original);
  meta_ = analyze(function_, inputs_, options_);
}

}  // namespace penstock::graph
