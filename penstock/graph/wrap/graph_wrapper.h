// Wrappers around the graphs of a capture, below autograd: they may change a graph before the compiler gets
// it, and turn what the compiler makes of it into something with other inputs and outputs.
//
//   auto forward = compile_wrapped(halves.forward, {.role = GraphRole::Forward},
//       *graph_compiler("executor"), wrappers);
//
// There are two levels because autograd is between them. A wrapper of calls (call_wrapper.h) acts around the
// differentiable call: what it does to inputs and results is differentiated. A wrapper of graphs acts inside
// the one autograd node of a call, on forward and backward separately: what the node takes and returns, and
// so what has gradients, is what the outermost wrapper takes and returns.
//
// A backward that is split (CompileOptions::split_backward) consists of two graphs with the role Backward.
// The first one returns what it keeps for the second one after its other results. The second one takes saved
// tensors and what was kept, no tangents, and returns undefined gradients in place of those of the first.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph_compiler.h"

namespace penstock::graph {

// Immutable. Thread safety: any thread.
class GraphWrapper {
 public:
  virtual ~GraphWrapper() = default;
  virtual std::string_view name() const = 0;
  // What it was made for, on one line; may be empty.
  virtual std::string decision() const { return {}; }
  // Changes a graph, which has been split, before it is compiled. What a graph returns for backward, and what
  // backward takes, must keep its order; who adds inputs before others corrects the indices of the request.
  virtual void before_compile(Graph& /*graph*/, CompileRequest& /*request*/) const {}
  // Turns gradients of results into what the next inner wrapper, or the backward graph, takes after the saved
  // tensors. Called when nothing has been released yet: what it throws leaves backward to be tried again. An
  // undefined tensor stands for a result without gradient.
  virtual std::vector<at::Tensor> tangents(std::vector<at::Tensor> gradients) const { return gradients; }
  // Wraps the compiled graph; the gradients that backward takes are those of tangents() already.
  virtual std::shared_ptr<const CompiledGraph> around(std::shared_ptr<const CompiledGraph> inner,
                                                      GraphRole /*role*/) const {
    return inner;
  }
};

using GraphWrappers = std::vector<std::shared_ptr<const GraphWrapper>>;

// Compiles a graph between wrappers: they change it in the order of the list, and what was compiled is
// wrapped in reverse order, so that the first is the outermost.
std::shared_ptr<const CompiledGraph> compile_wrapped(const Graph& graph, CompileRequest request,
                                                     const GraphCompiler& compiler,
                                                     const GraphWrappers& wrappers);

}  // namespace penstock::graph
