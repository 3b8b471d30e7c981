// A capture that is ready to run: its graphs are compiled, and wrapped so that a call does what the function
// does. Immutable, except for the sizes of dynamic dims that it remembers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/graph/compiler/graph_compiler.h"
#include "penstock/graph/run/dynamic_call.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/graph_call.h"

namespace penstock::graph {

// The code of both halves, for compilers that keep some (GraphCompiler::artifact).
struct CompiledCode {
  std::optional<std::vector<std::uint8_t>> forward, backward;
};

class CompiledCall {
 public:
  // `trust_sizes`: for a capture for all sizes (DynamicOptions::trust). `code`: what code() has returned for
  // the same capture in an earlier run; the graphs are not compiled again.
  CompiledCall(PartitionedCapture capture, const GraphCompiler& compiler, bool trust_sizes = false,
               const CompiledCode& code = {});

  // `sizes` is null if nothing is dynamic.
  Values run(const Values& inputs, const CallSizes& sizes = {}) const { return call_(inputs, sizes); }

  const FunctionCapture& capture() const { return partitioned_.capture; }
  const Partition& halves() const { return partitioned_.halves; }
  // The code that the compiler has made.
  CompiledCode code(const GraphCompiler& compiler) const;
  // The names of the wrappers around the graphs, outermost first.
  std::vector<std::string> wrappers() const;
  // Set if the capture is for all sizes.
  std::optional<DynamicCall>& dynamic() { return dynamic_; }
  const std::optional<DynamicCall>& dynamic() const { return dynamic_; }

 private:
  PartitionedCapture partitioned_;
  CompiledHalves compiled_;
  std::vector<WrapperInUse> wrappers_;
  Call call_;
  std::optional<DynamicCall> dynamic_;
};

}  // namespace penstock::graph
