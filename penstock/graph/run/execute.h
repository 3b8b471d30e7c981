// Runs a graph: each operator in order, each tensor freed as soon as nobody needs it any more.
//
//   const Executor run(graph);                     // once: what to call and what to free when
//   std::vector<c10::IValue> results = run({x, w});
//
// Operators run below autograd: nothing of a run is differentiated, and in-place operators write their arguments in earnest. Each sees the
// grad mode that it was recorded under, because some kernels (recurrent layers) keep more for backward when it is on.
// An input handed over by move is freed at its last use like everything else.
// A graph with symbols takes what they are in a run: `run({x, w}, graph.table->at({8, 128}).get())`.
// Thread rule: one Executor may run in several threads at once.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct BoundSizes;

class Executor {
 public:
  // Verifies the graph and keeps what a run needs of it; the graph may then go.
  explicit Executor(const Graph& graph);

  // One tensor for each input of the graph, defined ones. Returns one value for each output; undefined tensors for those that
  // are kNoValue. Throws ValueError when the number of inputs is not that of the graph, one is undefined, or the graph has symbols and no
  // sizes are given for them.
  std::vector<c10::IValue> operator()(std::vector<at::Tensor> inputs, const BoundSizes* sizes = nullptr) const;

  std::size_t input_count() const { return inputs_.size(); }

 private:
  // What to push for one argument. `slot`: where a tensor lies; of lists and constants, their place in `lists_` and `plain_`; of symbolic
  // constants, in the table.
  struct Push {
    enum class Kind : std::uint8_t { Constant, Symbolic, Copy, Move, Undefined, List, OptionalList };
    Kind kind = Kind::Constant;
    std::uint32_t slot = 0;
  };
  struct Keep {
    enum class Kind : std::uint8_t { Drop, Tensor, List };
    Kind kind = Kind::Drop;
    std::uint32_t slot = 0;
  };
  struct ListItem {
    std::int32_t slot = -1;  // -1: missing
  };
  struct Step {
    c10::OperatorHandle op;
    bool grad_enabled = true;
    std::uint32_t pushes_end = 0, keeps_end = 0, frees_end = 0;  // ends in the arrays below; they begin where the step before ends
  };

  void plan_node(const Graph& graph, const Node& node, std::size_t position, const std::vector<std::size_t>& last_use);
  void push(std::vector<at::Tensor>& slots, const Push& what, const BoundSizes* sizes, std::vector<c10::IValue>* stack) const;

  std::vector<Step> steps_;
  std::vector<Push> pushes_;
  std::vector<Keep> keeps_;
  std::vector<std::uint32_t> frees_;
  std::vector<c10::IValue> plain_;                    // constant arguments
  std::vector<std::vector<ListItem>> lists_;
  struct FoundTensor {
    std::uint32_t slot = 0;
    at::Tensor tensor;
    SymbolicId symbolic = kNotSymbolic;
  };
  std::vector<FoundTensor> constants_;
  std::vector<std::uint32_t> inputs_;
  std::vector<Operand> outputs_;
  std::size_t slot_count_ = 0;
  bool needs_sizes_ = false;
};

}  // namespace penstock::graph
