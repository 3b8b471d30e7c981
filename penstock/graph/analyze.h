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

#include <functional>
#include <vector>

#include "penstock/graph/metadata.h"

namespace penstock::graph {

// Tensors and anything else that a function takes or gives; only tensors flow, the rest is fixed by the capture.
using Values = std::vector<c10::IValue>;
using Function = std::function<Values(const Values&)>;

struct AnalyzeOptions {
  bool keep_input_mutations = false;
};

ViewAndMutationMeta analyze(const Function& function, const Values& inputs, const AnalyzeOptions& options = {});

}  // namespace penstock::graph
