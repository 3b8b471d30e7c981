// Finds out what a function does to its inputs and how its outputs alias, by running it once in shape only.
//
//   Function step = [](const Values& in) -> Values { in[0].toTensor().mul_(2); return {in[0].toTensor() + in[1].toTensor()}; };
//   const ViewAndMutationMeta meta = analyze(step, {x, y});
//   meta.inputs[0].mutates_data;        // true; x itself is untouched
//
// Inputs are taken as separate memory even when they share it; the same tensor given twice is one. An in-place operator that
// autograd would refuse (on a leaf that needs a gradient) throws as it would in earnest, and so does an operator whose result
// depends on values (DataDependentError, which names it).
// The thread's grad mode is left as it was, whatever the function does to it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "penstock/graph/ir/metadata.h"

namespace penstock::graph {

// Tensors and anything else that a function takes or gives; only tensors flow, the rest is fixed by the capture.
using Values = std::vector<c10::IValue>;
using Function = std::function<Values(const Values&)>;

// How a function gets its inputs.
struct Convention {
  // The first so many inputs are tensors that the function finds by itself, the parameters and buffers of a module: while it is captured
  // these very tensors are fake (fake_in_place.h), and leaves are leaves.
  std::size_t found = 0;
  std::vector<std::string> names;  // of inputs, for graphs and messages; empty: by number

  std::string name_of(std::size_t input) const { return input < names.size() ? names[input] : "input " + std::to_string(input); }
};

struct AnalyzeOptions {
  bool keep_input_mutations = false;
  Convention convention = {};
};

ViewAndMutationMeta analyze(const Function& function, const Values& inputs, const AnalyzeOptions& options = {});

}  // namespace penstock::graph
