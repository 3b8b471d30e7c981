// Plans the run of a graph: how each operator is called, and when each tensor is freed.
// Private to this folder. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/compiler/run_plan.h"

namespace penstock::graph {

// The node that uses each value last.
class LastUses {
 public:
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);
  static constexpr std::size_t kAtTheEnd = static_cast<std::size_t>(-2);  // outputs and constants

  explicit LastUses(const Graph& graph);
  std::size_t of(ValueId value) const { return last_[index_of(value)]; }
  // Whether a value is used after a node.
  bool after(std::size_t node, ValueId value) const {
    return value != kNoValue && of(value) != kNever && of(value) > node;
  }

 private:
  std::vector<std::size_t> last_;
};

std::unique_ptr<ExecutionPlan> plan_run(const Graph& graph, const LastUses& last_uses,
                                        const ExecutorOptions& options, Executor::Counts& counts);

}  // namespace penstock::graph
