// One capture for all sizes, made of captures at some.
//
//   Generalized all = capture_for_all_sizes(function, inputs, options, convention, symbols);
//   if (!all.call) ... all.refused says why
//
// See dynamic_dims.h.
#pragma once

#include <string>
#include <vector>

#include "penstock/graph/run/captured_call.h"

namespace penstock::graph {

struct Generalized {
  c10::intrusive_ptr<CapturedCall> call;   // ready to run
  std::string refused;                     // without a call: which node and argument, or what else, stands against it
};
Generalized capture_for_all_sizes(const Function& function, const Values& inputs, const CompileOptions& options, const Convention& convention,
                                  std::vector<DynamicSymbol> symbols);

// Empty when a capture with dynamic dims, for these sizes, does just what a capture at them does; otherwise what differs.
std::string difference_at(const CapturedCall& dynamic, const CapturedCall& fixed, const BoundSizes& sizes);

// ---- parts, for tests ----

// Inputs like these at other sizes: fake tensors for those that have dynamic dims.
Values inputs_at(const Values& inputs, const std::vector<DynamicSymbol>& symbols, const SymbolValues& sizes);

// Sizes at which to capture, in this order, until there are enough: larger than 1, near to `actual` but never equal to it, different from the other
// sizes of the inputs and, at one point, from each other, and in no relation between symbols. Fewer where the ranges of the symbols allow no more.
std::vector<SymbolValues> sample_sizes(const Values& inputs, const std::vector<DynamicSymbol>& symbols, const SymbolValues& actual);

}  // namespace penstock::graph
