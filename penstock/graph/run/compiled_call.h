// A capture that is ready to run: its graphs are compiled, and wrapped so that a call does what the function
// does. Immutable, except for the sizes of dynamic dims that it remembers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/compiler/graph_compiler.h"
#include "penstock/graph/run/dynamic_call.h"
#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

class CompiledCall {
 public:
  // `trust_sizes`: for a capture for all sizes (DynamicOptions::trust).
  CompiledCall(PartitionedCapture capture, const GraphCompiler& compiler, bool trust_sizes = false);

  // `sizes` is null if nothing is dynamic.
  Values run(const Values& inputs, const CallSizes& sizes = {}) const { return call_(inputs, sizes); }

  const FunctionCapture& capture() const { return partitioned_.capture; }
  const Partition& halves() const { return partitioned_.halves; }
  // The names of the wrappers around the graphs, outermost first.
  std::vector<std::string> wrappers() const;
  // Set if the capture is for all sizes.
  std::optional<DynamicCall>& dynamic() { return dynamic_; }
  const std::optional<DynamicCall>& dynamic() const { return dynamic_; }

 private:
  PartitionedCapture partitioned_;
  std::vector<WrapperInUse> wrappers_;
  Call call_;
  std::optional<DynamicCall> dynamic_;
};

}  // namespace penstock::graph
