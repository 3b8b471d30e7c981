// A function and how it is called: what wrappers turn into another one before it is captured.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

class FunctionForm {
 public:
  // Analyzes the function.
  FunctionForm(Function function, Values inputs, AnalyzeOptions options = {});
  // For a function that has been analyzed.
  FunctionForm(Function function, Values inputs, AnalyzeOptions options, ViewAndMutationMeta meta);

  const Function& function() const { return function_; }
  const Values& inputs() const { return inputs_; }
  const Convention& convention() const { return options_.convention; }
  const ViewAndMutationMeta& meta() const { return meta_; }
  // "input 2", or the name of the input; by its position in the original call.
  std::string name_of(std::size_t input) const;

  // Another function over other inputs that does the same; analyzes it. `came_from`: for each new input, the
  // position of the input that it is, or the first one that it was made from.
  void replace(Function function, Values inputs, Convention convention,
               const std::vector<std::size_t>& came_from);

 private:
  Function function_;
  Values inputs_;
  AnalyzeOptions options_;
  ViewAndMutationMeta meta_;
  std::vector<std::size_t> original_;  // for each input, its position in the original call
};

}  // namespace penstock::graph
