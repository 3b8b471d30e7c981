// Builds one capture for all sizes from captures at several sizes.
//
//   Generalized all = capture_for_all_sizes(function, inputs, convention, symbols);
//   if (!all.capture) ... all.refused is the reason
//
// See compile_options.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

struct Generalized {
  std::optional<FunctionCapture> capture;  // with symbols
  // If there is none, the reason: which node and argument, or other cause.
  std::string refused;
};
Generalized capture_for_all_sizes(const Function& function, const Values& inputs,
                                  const Convention& convention, std::vector<DynamicSymbol> symbols);

// Returns an empty string if a capture with dynamic dims, bound to these sizes, is equivalent to a capture at
// them; otherwise the difference.
std::string difference_at(const FunctionCapture& dynamic, const FunctionCapture& fixed,
                          const BoundSizes& sizes);

// ---- internal, exposed for tests ----

// Inputs like these at other sizes: those with dynamic dims become fake tensors.
Values inputs_at(const Values& inputs, const std::vector<DynamicSymbol>& symbols, const SymbolValues& sizes);

// Sizes to capture at, in this order, until there are enough: larger than 1, close but not equal to `actual`,
// different from the other sizes of the inputs and, within one point, from each other, with no relation
// between symbols. Fewer if the ranges of the symbols do not allow more.
std::vector<SymbolValues> sample_sizes(const Values& inputs, const std::vector<DynamicSymbol>& symbols,
                                       const SymbolValues& actual);

}  // namespace penstock::graph
