// Runs recorded nodes again, operator by operator through the dispatcher, so that autograd makes a graph of
// them as it did of the original.
//
//   const NodeReplay replay(trace, stage, {.inputs = inputs, .outputs = outputs});
//   std::vector<c10::IValue> results = replay.run(tensors);
//
// Values are released after their last use. Nodes that were recorded without grad mode run without it. A
// user-defined autograd function becomes one autograd node, which replays the backward that was recorded,
// under the StepContext of its forward, so that it draws the same random numbers. Differentiating that
// backward again works as far as its operators have derivatives.
//
// Immutable. Thread safety: `run` may be called by several threads if the operators may.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "penstock/graph/stages/forward_trace.h"

namespace penstock::graph {

// Which part of a trace is run, and what it takes and returns.
struct ReplayPart {
  std::size_t first = 0, end = 0;      // nodes
  std::vector<std::size_t> functions;  // of the trace, ascending
  std::vector<ValueId> inputs;         // kNoValue: ignored
  std::vector<Operand> outputs;
  // Operators that were recorded with tensors on the first device make them on the second.
  at::Device recorded_on = at::kCPU, device = at::kCPU;
};

struct ReplaySteps;

class NodeReplay {
 public:
  NodeReplay(const ForwardTrace& trace, const ReplayPart& part);
  ~NodeReplay();
  NodeReplay(NodeReplay&&) noexcept;
  NodeReplay& operator=(NodeReplay&&) noexcept;

  // Takes one tensor for each input, and returns one value for each output.
  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs) const;

 private:
  std::shared_ptr<const ReplaySteps> steps_;
};

}  // namespace penstock::graph
