// Graph passes: named functions from a graph (graph.h) to a graph that computes the same, which run between a
// capture and its compilers. The library has a list of them (docs/capture.md#passes); a program may add its
// own, and CompileOptions::disable_passes leaves passes out.
//
//   class CountingPass final : public graph::GraphPass {
//    public:
//     std::string_view name() const override { return "counting"; }
//     graph::Graph run(graph::Graph graph, const graph::PassContext& context) const override {
//       context.note(std::to_string(graph.nodes.size()) + " nodes");
//       return graph;
//     }
//   };
//   graph::register_graph_pass(std::make_shared<CountingPass>());
//
// A pass is given a graph without operators that write. It must return one with the same inputs and outputs
// in the same order, of the same geometry; outputs that share memory with inputs or with each other still
// share it, others still do not. Operators that draw random numbers or have side effects are kept, once, in
// one order for both, and with the values that they return; only collectives of this library may change
// places with draws. Results keep their bits. With
// CompileOptions::verify_passes, and in debug builds, this is checked after each pass, as far as the graph
// shows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph.h"

namespace penstock::graph {

// Which graph of a call a pass is given.
enum class PassRole : std::uint8_t {
  Joint,     // forward and backward in one graph, before it is known what forward saves
  Forward,   // after that: results, then what is saved for backward
  Backward,  // saved tensors and gradients of results to gradients of inputs
  Inference  // a graph without a backward
};
// Returns "joint", "forward", "backward" or "inference".
std::string_view to_text(PassRole role);

// What a pass is told about the graph.
struct PassContext {
  PassRole role = PassRole::Inference;      // what the graph is to a call
  std::vector<std::size_t> static_inputs;   // inputs that are the same tensors in each call
  std::vector<std::size_t> donated_inputs;  // inputs that nobody reads after the run
  // Receives why the pass left something out; shown by `penstock inspect graph --passes` and in the log of a
  // capture. Never empty.
  std::function<void(const std::string& text)> note = [](const std::string&) {};
};

// A named function from a graph to a graph. Thread safety: run() may be called by several threads at once.
class GraphPass {
 public:
  // May be deleted through this class.
  virtual ~GraphPass() = default;
  // The name that options disable it by.
  virtual std::string_view name() const = 0;
  // Returns a graph that computes the same. What it throws, the captured call throws.
  virtual Graph run(Graph graph, const PassContext& context) const = 0;
  // Whether it is run on such a graph. Default: on joint graphs and on those without a backward.
  virtual bool runs_on(PassRole role) const { return role == PassRole::Joint || role == PassRole::Inference; }
  // Whether it can be given a graph whose sizes are symbols (Graph::table). The joint graph of a capture for
  // all sizes is compared with captures at other sizes and never changed; a pass for joint graphs is given
  // its halves instead. Default: no, the pass is left out there, and the log says so.
  virtual bool takes_symbols() const { return false; }
  // Part of the keys of stored graphs (docs/compile_cache.md): another text for each change of what the pass
  // makes of a graph.
  virtual std::string version() const { return "1"; }
};

// Adds a pass at the end of the list, or before the pass of the given name. It takes part in what is compiled
// afterwards. Throws ValueError if there is no pass, its name is empty or taken, or `before` is unknown.
// Thread safety: any thread.
void register_graph_pass(std::shared_ptr<const GraphPass> pass, std::string_view before = {});
// Returns the names of all passes, in the order in which they run.
std::vector<std::string> graph_pass_names();

}  // namespace penstock::graph
