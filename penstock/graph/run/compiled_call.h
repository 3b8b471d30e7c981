// A capture that is ready to run: its graphs are compiled, and wrapped so that a call does what the function
// does. Immutable, except for the sizes of dynamic dims that it remembers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/run/dynamic_call.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/wrap/graph_wrapper.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

// Which compiler gets which graph. They are used only while a call is made.
struct CompilerChoice {
  CompilerChoice(const GraphCompiler& all) : forward(all), backward(all), inference(all) {}
  CompilerChoice(const GraphCompiler& of_forward, const GraphCompiler& of_backward,
                 const GraphCompiler& of_inference)
      : forward(of_forward), backward(of_backward), inference(of_inference) {}
  const GraphCompiler &forward, &backward, &inference;
};

class CompiledCall {
 public:
  // `trust_sizes`: for a capture for all sizes (DynamicOptions::trust). `outside`: wrappers of the graphs
  // outside of the library's own.
  CompiledCall(PartitionedCapture capture, const CompilerChoice& compilers, bool trust_sizes = false,
               GraphWrappers outside = {});

  // `sizes` is null if nothing is dynamic.
  Values run(const Values& inputs, const CallSizes& sizes = {}) const { return call_(inputs, sizes); }

  const FunctionCapture& capture() const { return partitioned_.capture; }
  const Partition& halves() const { return partitioned_.halves; }
  // The names of the wrappers, outermost first: those of calls, then, inside autograd, those of graphs.
  std::vector<std::string> wrappers() const;
  // One line for each: "duplicate inputs: input 1 is input 0".
  std::vector<std::string> wrapper_decisions() const;
  // Set if the capture is for all sizes.
  std::optional<DynamicCall>& dynamic() { return dynamic_; }
  const std::optional<DynamicCall>& dynamic() const { return dynamic_; }

 private:
  PartitionedCapture partitioned_;
  std::vector<WrapperInUse> wrappers_;
  GraphWrappers graph_wrappers_;
  Call call_;
  std::optional<DynamicCall> dynamic_;
};

}  // namespace penstock::graph
