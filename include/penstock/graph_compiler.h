// Compilers of captured graphs: what turns a graph (graph.h) into something that runs. The built-in one,
// "executor", calls the operators in order; "fused" generates code for groups of them, too. A compiler of
// your own may change a graph and pass it on:
//
//   class Reporting final : public graph::GraphCompiler {
//    public:
//     std::string_view name() const override { return "reporting"; }
//     std::shared_ptr<const graph::CompiledGraph> compile(const graph::Graph& graph,
//                                                         const graph::CompileRequest& how) const override {
//       std::cout << to_text(how.role) << ": " << graph.nodes.size() << " operators\n";
//       return graph::graph_compiler("executor")->compile(graph, how);
//     }
//   };
//   graph::register_graph_compiler(std::make_shared<Reporting>());
//   torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::ReLU());
//   auto fast = graph::compile(net, {.compiler = "reporting"});
//   fast->forward(torch::randn({2, 4})).sum().backward();     // compiled: forward, backward
//
// examples/own_compiler.cpp is a whole program. Everything around a graph, such as writing inputs that the
// function wrote, taking tensor subclasses apart and saving for backward, is done by the library whatever the
// compiler is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph.h"

namespace penstock::graph {

// The values of a graph's symbols in one call. Opaque: a compiler that passes a graph on passes it on, too.
struct BoundSizes;

// What a graph is to a call. An inference graph has no backward: nothing is saved.
enum class GraphRole : std::uint8_t { Forward, Backward, Inference };
// Returns "forward", "backward" or "inference".
std::string_view to_text(GraphRole role);

// What a compiler is told about the calls of a graph. Example sizes, dtypes and devices are in the graph.
struct CompileRequest {
  GraphRole role = GraphRole::Inference;  // what the graph is to a call
  // Inputs that are the same tensor in each call, normally at the same address: parameters and buffers. A
  // compiler that relies on the address (a device graph) must compare it, since `set_data` changes it.
  std::vector<std::size_t> static_inputs;
  // Inputs that nobody reads after the run: saved for this backward alone. The run may overwrite such an
  // input if it also holds the only reference to it and to its memory, which is not so if autograd's graph is
  // retained.
  std::vector<std::size_t> donated_inputs;
  bool exact = false;  // generated code must have the bits of the operators (CompileOptions::compile_exact)
  bool check = false;  // compare generated code with the operators once (CompileOptions::compile_check)
};

// A graph that is ready to run. Thread safety: run() may be called by several threads at once.
class CompiledGraph {
 public:
  // May be deleted through this class.
  virtual ~CompiledGraph() = default;
  // Takes one defined tensor for each input of the graph; one that is passed by move may be freed at its last
  // use. Returns one value for each output, an undefined tensor for outputs that are kNoValue. `sizes`: the
  // values of the symbols, if the graph has any (Graph::table). Runs without autograd: the caller
  // differentiates the call as a whole.
  virtual std::vector<c10::IValue> run(std::vector<at::Tensor> inputs,
                                       const BoundSizes* sizes = nullptr) const = 0;
};

// Makes graphs ready to run. Thread safety: compile() may be called by several threads at once.
class GraphCompiler {
 public:
  // May be deleted through this class.
  virtual ~GraphCompiler() = default;
  // The name that options select it by.
  virtual std::string_view name() const = 0;
  // Compiles a graph without operators that write, except for writes to inputs at its end
  // (CompileOptions::keep_input_mutations). The graph may be destroyed afterwards. What it throws, the
  // captured call throws.
  virtual std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                                       const CompileRequest& request) const = 0;

  // ---- for compilers with code that is worth keeping between runs (docs/compile_cache.md) ----

  // Part of the keys of stored code: another text for each change of what the compiler makes of a graph.
  virtual std::string version() const { return "1"; }
  // Returns the code of a graph that this compiler has compiled, for load(). Default: std::nullopt, only the
  // graph is kept and is compiled again.
  virtual std::optional<std::vector<std::uint8_t>> artifact(const CompiledGraph& /*compiled*/) const {
    return std::nullopt;
  }
  // Makes a graph ready to run from the code that artifact() has returned for an equal graph and request, in
  // this or another process. The bytes are undamaged. Returns null to have the graph compiled instead, which
  // is the default.
  virtual std::shared_ptr<const CompiledGraph> load(const Graph& /*graph*/, const CompileRequest& /*request*/,
                                                    std::span<const std::uint8_t> /*code*/) const {
    return nullptr;
  }
};

// Makes a compiler known by its name, for CompileOptions. Throws ValueError if there is none, its name is
// empty, or the name is taken. Thread safety: any thread.
void register_graph_compiler(std::shared_ptr<const GraphCompiler> compiler);
// Returns the compiler of this name. Throws ValueError, which lists the names and suggests the nearest, if
// there is none.
std::shared_ptr<const GraphCompiler> graph_compiler(std::string_view name);
// Returns the names of all compilers, in alphabetical order.
std::vector<std::string> graph_compiler_names();

// The names of the built-in compilers: one that calls the operators, and one that generates code for groups
// of them (docs/fused.md).
inline constexpr std::string_view kExecutorCompiler = "executor";
inline constexpr std::string_view kFusedCompiler = "fused";  // see kExecutorCompiler

}  // namespace penstock::graph
