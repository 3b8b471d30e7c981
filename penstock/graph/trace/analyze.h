// Determines which inputs a function mutates and how its outputs alias, by running it once on fake tensors.
//
//   Function step = [](const Values& in) -> Values {
//     in[0].toTensor().mul_(2);
//     return {in[0].toTensor() + in[1].toTensor()};
//   };
//   const ViewAndMutationMeta meta = analyze(step, {x, y});
//   meta.inputs[0].mutates_data;        // true; x itself is untouched
//
// Inputs are treated as separate memory even if they share it; a tensor passed twice counts as one input. An
// in-place operator that autograd would reject (on a leaf that requires a gradient) throws as it does in a
// real run, and so does an operator whose result depends on values (DataDependentError, which names it).
// The thread's grad mode is restored, whatever the function does to it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/ir/metadata.h"
#include "penstock/graph/trace/decompositions.h"

namespace penstock::graph {

// The arguments or results of a function. Only tensors become values of the graph; everything else is fixed
// by the capture.
using Values = std::vector<c10::IValue>;
using Function = std::function<Values(const Values&)>;
inline bool is_defined_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

// How a function receives its inputs.
struct Convention {
  // The first `found` inputs are tensors that the function accesses by itself, the parameters and buffers of
  // a module. During the capture these tensors themselves are fake (fake_in_place.h), and leaves remain
  // leaves.
  std::size_t found = 0;
  std::vector<std::string> names;  // of the inputs, for graphs and messages; if empty, inputs are numbered
  std::shared_ptr<const DecompositionTable> decompositions = nullptr;  // null: none

  std::string name_of(std::size_t input) const {
    return input < names.size() ? names[input] : "input " + std::to_string(input);
  }
};

// Which inputs the graph may write itself.
struct AnalyzeOptions {
  bool keep_input_mutations = false;
  // Only those whose data alone changes, in calls without tensor subclasses: what a captured graph can write.
  // The others are written after the graph has run.
  bool keep_only_data_mutations = false;
  Convention convention = {};
};

ViewAndMutationMeta analyze(const Function& function, const Values& inputs,
                            const AnalyzeOptions& options = {});

}  // namespace penstock::graph
