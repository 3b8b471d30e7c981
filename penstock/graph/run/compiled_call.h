// A capture that is ready to run: its graphs are compiled, and wrapped so that a call does what the function
// does. Immutable, except for the sizes of dynamic dims that it remembers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/run/dynamic_call.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/wrap/graph_wrapper.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

// Which compiler gets which graph.
struct CompilerChoice {
  CompilerChoice(std::shared_ptr<const GraphCompiler> all) : forward(all), backward(all), inference(all) {}
  CompilerChoice(std::shared_ptr<const GraphCompiler> of_forward,
                 std::shared_ptr<const GraphCompiler> of_backward,
                 std::shared_ptr<const GraphCompiler> of_inference)
      : forward(std::move(of_forward)),
        backward(std::move(of_backward)),
        inference(std::move(of_inference)) {}
  std::shared_ptr<const GraphCompiler> forward, backward, inference;
};

// The code of both halves, of compilers that keep some (GraphCompiler::artifact). `weights`: of the second
// part of a backward that is split.
struct CompiledCode {
  std::optional<std::vector<std::uint8_t>> forward, backward, weights;
};

struct CompiledCallOptions {
  bool trust_sizes = false;  // for a capture for all sizes (DynamicOptions::trust)
  CompileBackward compile_backward = CompileBackward::AtOnce;
  GraphWrappers outside = {};  // wrappers of the graphs, outside of the library's own
  // What code() has returned for the same capture in an earlier run: the graphs are not compiled again.
  CompiledCode code = {};
  bool exact = false, check = false;  // CompileRequest
};

class CompiledHalf;

class CompiledCall {
 public:
  CompiledCall(PartitionedCapture capture, const CompilerChoice& compilers, CompiledCallOptions options = {});

  // `sizes` is null if nothing is dynamic.
  Values run(const Values& inputs, const CallSizes& sizes = {}) const { return call_(inputs, sizes); }

  const FunctionCapture& capture() const { return partitioned_.capture; }
  const Partition& halves() const { return partitioned_.halves; }
  // The code that the compilers have made. Without that of a backward half that was not compiled yet
  // (CompileBackward::FirstUse).
  CompiledCode code() const;
  // The names of the wrappers, outermost first: those of calls, then, inside autograd, those of graphs.
  std::vector<std::string> wrappers() const;
  // One line for each: "duplicate inputs: input 1 is input 0".
  std::vector<std::string> wrapper_decisions() const;
  // Set if the capture is for all sizes.
  std::optional<DynamicCall>& dynamic() { return dynamic_; }
  const std::optional<DynamicCall>& dynamic() const { return dynamic_; }

 private:
  PartitionedCapture partitioned_;
  // No backward in a call for inference; no weights unless backward is split.
  std::shared_ptr<const CompiledHalf> forward_, backward_, weights_;
  std::vector<WrapperInUse> wrappers_;
  GraphWrappers graph_wrappers_;
  Call call_;
  std::optional<DynamicCall> dynamic_;
};

}  // namespace penstock::graph
