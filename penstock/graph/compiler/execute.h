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
//
// What makes a run fast. Operators with common signatures are called without boxing (unboxed_call.h). Views
// are made without their operators (direct_view.cpp), as are products of matrices and copies on the CPU
// (direct_kernel.h), and pointwise results are put into the memory of arguments that are not used afterwards
// (dead_memory.h); all three only if no mode is active, which must see the operators as recorded, and if the
// tensors are what was planned. All this changes no bit of a result. Lists
// and slots are kept between runs: in the steady state a run allocates the list of results that it returns,
// and what its operators allocate.
// Thread safety: one Executor may run in several threads at once, and within a run of itself.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

struct Frame;
struct ExecutionPlan;

// How to run.
struct ExecutorOptions {
  bool unboxed = true;         // call operators with common signatures without boxing
  bool direct_views = true;    // make views without their operators
  bool reuse_memory = true;    // put results into the memory of arguments that are not used afterwards
  bool direct_kernels = true;  // make products of matrices and copies without their operators
  // Inputs whose memory may be overwritten too (CompileRequest::donated_inputs).
  std::vector<std::size_t> donated_inputs = {};
};

class Executor final : public CompiledGraph {
 public:
  // Verifies the graph and copies what a run needs; the graph may then be destroyed.
  explicit Executor(const Graph& graph, const ExecutorOptions& options = {});
  ~Executor() override;

  // Takes one defined tensor for each input of the graph. Returns one value for each output; undefined
  // tensors for outputs that are kNoValue. Throws ValueError if the number of inputs differs from that of the
  // graph, one is undefined, or the graph has symbols and `sizes` is null.
  std::vector<c10::IValue> operator()(std::vector<at::Tensor> inputs,
                                      const BoundSizes* sizes = nullptr) const;
  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    return (*this)(std::move(inputs), sizes);
  }

  std::size_t input_count() const { return inputs_.size(); }

  // How many nodes are called in which way.
  struct Counts {
    std::size_t boxed = 0, unboxed = 0;
    std::size_t views = 0;      // of both, those that are normally made without their operator
    std::size_t reuses = 0;     // of both, those that may overwrite an argument
    std::size_t kernels = 0;    // of both, those that may compute without their operator
    std::size_t generated = 0;  // generated code in place of operators
  };
  const Counts& counts() const { return counts_; }

 private:
  class Planner;
  struct Input {
    std::uint32_t slot = 0;
    bool unused = false;
  };
  struct Constant {
    std::uint32_t slot = 0;
    at::Tensor tensor;
    SymbolicId symbolic = kNotSymbolic;
  };
  struct Output {
    c10::IValue constant;  // of an output that is not a tensor
    SymbolicId symbolic = kNotSymbolic;
    bool is_tensor = false;
    bool last = false;  // no other output is the same value
    std::uint32_t slot = 0;
  };

  std::unique_ptr<Frame> take_frame() const;
  void call_steps(Frame& frame) const;
  std::vector<c10::IValue> take_results(Frame& frame) const;

  std::unique_ptr<ExecutionPlan> plan_;
  std::vector<Input> inputs_;
  std::vector<Constant> constants_;
  std::vector<Output> outputs_;
  Counts counts_;
  bool needs_sizes_ = false;

  // Frames that no run uses. They hold no tensors but the graph's constants.
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Frame>> frames_;
};

}  // namespace penstock::graph
