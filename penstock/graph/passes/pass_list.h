// The passes that a capture goes through, in order.
//
//   const PassList passes({"algebraic"});                        // all but this one
//   graph = passes.run(std::move(graph), {.role = PassRole::Joint}, &log);
//
// Thread safety: immutable; run() may be called by several threads at once.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "penstock/graph/passes/standard_passes.h"
#include "penstock/graph_pass.h"

namespace penstock::graph {

// What one pass did to one graph.
struct PassRun {
  std::string pass;
  PassRole role = PassRole::Inference;
  std::size_t nodes_before = 0, nodes_after = 0;
  std::string note;      // why something was left out; empty: nothing was
  bool skipped = false;  // the pass did not run; `note` is the reason
};

struct PassLog {
  std::vector<PassRun> runs;
  // If set, called after each run with the graphs before and after, which costs a copy of the graph.
  std::function<void(const PassRun& run, const Graph& before, const Graph& after)> observe = {};

  // "algebraic (joint): 3 nodes less", joined by "; ". Only passes that changed the number of nodes or say
  // something; empty if there are none.
  std::string text() const;
};

class PassList {
 public:
  // All passes that exist now but the disabled ones. `verify`: check the graph after each pass; always done
  // in debug builds. Throws ValueError, which names the nearest, for an unknown name.
  explicit PassList(const std::vector<std::string>& disabled = {}, bool verify = false);
  // These passes, in this order.
  PassList(std::vector<PassPointer> passes, bool verify) : passes_(std::move(passes)), verify_(verify) {}

  // Runs those that are for such a graph. `instead_of_joint`: also those for joint graphs, on a half of a
  // capture whose joint graph must not change.
  Graph run(Graph graph, PassContext context, PassLog* log = nullptr, bool instead_of_joint = false) const;

  const std::vector<PassPointer>& passes() const { return passes_; }
  // Names and versions, for keys.
  std::string text() const;

 private:
  std::vector<PassPointer> passes_;
  bool verify_;
};

// Throws ValueError, which names the nearest, if one of the names is not that of a pass.
void check_disabled_passes(const std::vector<std::string>& names);

}  // namespace penstock::graph
