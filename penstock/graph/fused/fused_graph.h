// The compiler "fused": groups of operators as generated kernels for CPU and CUDA, the rest by the executor.
//
//   const auto compiled = graph_compiler("fused")->compile(graph, {});
//   if (const FusedGraph* fused = fused_graph(*compiled))
//     for (const FusedKernelReport& kernel : fused->kernels()) std::cout << kernel.operators << "\n";
//
// docs/fused.md describes it. Thread safety: that of a CompiledGraph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/fused/fused_kernel.h"
#include "penstock/graph/fused/fusion.h"
#include "penstock/graph/fused/generated_code.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

struct FusedKernelReport {
  std::string name;        // of the function: kernels that do the same are one
  std::string operators;   // "aten::mul x2, aten::rsqrt"
  std::string form;        // "elements", "rows", "columns"
  std::int64_t bytes = 0;  // read and written by a call
  std::uint64_t calls = 0;
  std::uint64_t calls_of_operators = 0;  // instead of the kernel
  double seconds = 0;                    // of the shortest call while measured
  std::string source;
};

// How groups are chosen and compiled; for tests.
struct FusedCompileOptions {
  FusionOptions fusion = {};
  FusedKernelOptions kernels = {};
  std::vector<std::size_t> donated_inputs = {};
};

class FusedGraph final : public CompiledGraph {
 public:
  // A library of functions: its source, and what was made of it.
  struct Code {
    std::string source;
    std::vector<std::uint8_t> object;  // what the compiler has made
    std::shared_ptr<const GeneratedCode> loaded;
  };

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override;

  // In the order of the graph.
  std::vector<FusedKernelReport> kernels() const;
  // Whether calls of kernels are timed; sets their times and counts to 0.
  void measure(bool on) const;
  const std::vector<std::shared_ptr<const Code>>& code() const { return code_; }
  const Executor::Counts& counts() const { return fused_->counts(); }

 private:
  friend class FusedCompilation;
  FusedGraph() = default;

  Graph graph_;  // as it was given
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<const FusedKernel>> kernels_;
  std::vector<std::shared_ptr<const Code>> code_;
  std::vector<std::size_t> donated_inputs_;
  std::unique_ptr<const Executor> fused_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<const Executor> plain_;  // for runs under a mode
};

// Null if it was compiled by another compiler, or if there was nothing to fuse.
const FusedGraph* fused_graph(const CompiledGraph& compiled);

// Compiles a graph; `stored`: objects of an earlier run, used if their sources are those of this graph.
// Returns the executor's graph if nothing is fused, or if code cannot be generated, with a warning.
std::shared_ptr<const CompiledGraph> compile_fused(
    const Graph& graph, const FusedCompileOptions& options,
    const std::vector<std::vector<std::uint8_t>>* stored = nullptr);

// Makes and compiles the code of each device of a graph.
using CodeTargets = std::map<std::string, std::unique_ptr<const CodeTarget>>;  // by device
CodeTargets targets_of(const FusionPlan& plan);

// The kernels of a plan as sources, several functions in each, and the function of each group.
struct FusedSources {
  std::vector<std::string> sources;
  std::vector<c10::Device> devices;  // by source
  struct Place {
    std::size_t source = 0;
    std::string function, text;
  };
  std::vector<Place> places;  // by group
};
FusedSources sources_of(const FusionPlan& plan, const CodeTargets& targets, std::size_t most_sources);

}  // namespace penstock::graph
