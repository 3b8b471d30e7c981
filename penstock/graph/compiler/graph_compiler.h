// What turns a graph into something that runs. The built-in one, "executor", calls its operators in order.
//
//   std::shared_ptr<const GraphCompiler> compiler = graph_compiler("executor");
//   std::shared_ptr<const CompiledGraph> run = compiler->compile(graph, GraphRole::Inference);
//   std::vector<c10::IValue> results = run->run({x, w});
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct BoundSizes;

// What a graph is to a call. An inference graph has no backward: nothing is saved.
enum class GraphRole : std::uint8_t { Forward, Backward, Inference };
std::string_view to_text(GraphRole role);

// A graph that is ready to run. Thread safety: run() may be called by several threads at once.
class CompiledGraph {
 public:
  virtual ~CompiledGraph() = default;
  // Takes one defined tensor for each input of the graph; one that is passed by move may be freed at its last
  // use. Returns one value for each output, an undefined tensor for outputs that are kNoValue. `sizes`: the
  // values of the symbols, if the graph has any.
  virtual std::vector<c10::IValue> run(std::vector<at::Tensor> inputs,
                                       const BoundSizes* sizes = nullptr) const = 0;
};

class GraphCompiler {
 public:
  virtual ~GraphCompiler() = default;
  virtual std::string_view name() const = 0;
  // The graph has no writes to its inputs. It may be destroyed afterwards.
  virtual std::shared_ptr<const CompiledGraph> compile(const Graph& graph, GraphRole role) const = 0;

  // ---- for compilers with code that is worth keeping between runs (docs/compile_cache.md) ----

  // Part of the keys of stored code: another text for each change of what the compiler makes of a graph.
  virtual std::string version() const { return "1"; }
  // Returns the code of a graph that this compiler has compiled, for load(). Default: std::nullopt, only the
  // graph is kept and is compiled again.
  virtual std::optional<std::vector<std::uint8_t>> artifact(const CompiledGraph&) const {
    return std::nullopt;
  }
  // Makes a graph ready to run from the code that artifact() has returned for it, in this or another process.
  // The bytes are undamaged. Returns null to have the graph compiled instead, which is the default.
  virtual std::shared_ptr<const CompiledGraph> load(const Graph&, GraphRole,
                                                    std::span<const std::uint8_t>) const {
    return nullptr;
  }
};

// Makes a compiler known by its name. Throws ValueError if the name is taken. Thread safety: any thread.
void register_graph_compiler(std::shared_ptr<const GraphCompiler> compiler);
// Throws ValueError, listing the names, for one that is not known.
std::shared_ptr<const GraphCompiler> graph_compiler(std::string_view name);
std::vector<std::string> graph_compiler_names();

inline constexpr std::string_view kExecutorCompiler = "executor";

}  // namespace penstock::graph
