// Runs a graph: each operator in order, each tensor freed after its last use.
//
//   const Executor run(graph);                     // plans once what to call and when to free
//   std::vector<c10::IValue> results = run({x, w});
//
// Operators run below autograd: a run is not differentiated, and in-place operators really write their
// arguments. Each operator runs under the grad mode it was recorded with, because some kernels (recurrent
// layers) keep more for backward when it is on.
// An input passed by move is freed at its last use like any other tensor.
// A graph with symbols needs their values: `run({x, w}, graph.table->at({8, 128}).get())`.
// Thread safety: one Executor may run in several threads at once.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/graph/compiler/graph_compiler.h"
#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

class Executor final : public CompiledGraph {
 public:
  // Verifies the graph and copies what a run needs; the graph may then be destroyed.
  explicit Executor(const Graph& graph);

  // Takes one defined tensor for each input of the graph. Returns one value for each output; undefined
  // tensors for outputs that are kNoValue. Throws ValueError if the number of inputs differs from that of the
  // graph, one is undefined, or the graph has symbols and `sizes` is null.
  std::vector<c10::IValue> operator()(std::vector<at::Tensor> inputs,
                                      const BoundSizes* sizes = nullptr) const;
  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    return (*this)(std::move(inputs), sizes);
  }

  std::size_t input_count() const { return inputs_.size(); }

 private:
  // How to push one argument. `slot`: where the tensor is stored; for lists and constants, the index into
  // `lists_` and `plain_`; for symbolic constants, the index into the table.
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
    // End indices into the arrays below; each range begins where the previous step's ends.
    std::uint32_t pushes_end = 0, keeps_end = 0, frees_end = 0;
  };

  void plan_node(const Graph& graph, const Node& node, std::size_t position,
                 const std::vector<std::size_t>& last_use);
  void push(std::vector<at::Tensor>& slots, const Push& what, const BoundSizes* sizes,
            std::vector<c10::IValue>* stack) const;

  std::vector<Step> steps_;
  std::vector<Push> pushes_;
  std::vector<Keep> keeps_;
  std::vector<std::uint32_t> frees_;
  std::vector<c10::IValue> plain_;  // constant arguments
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
