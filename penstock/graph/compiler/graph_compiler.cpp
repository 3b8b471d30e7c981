#include "penstock/graph/compiler/graph_compiler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/execute.h"

namespace penstock::graph {
namespace {

class ExecutorCompiler final : public GraphCompiler {
 public:
  std::string_view name() const override { return kExecutorCompiler; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph, GraphRole) const override {
    return std::make_shared<const Executor>(graph);
  }
};

struct KnownCompilers {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const GraphCompiler>, std::less<>> by_name{
      {std::string(kExecutorCompiler), std::make_shared<const ExecutorCompiler>()}};
};

KnownCompilers& known_compilers() {
  static KnownCompilers known;
  return known;
}

}  // namespace

std::string_view to_text(GraphRole role) {
  switch (role) {
    case GraphRole::Forward:
      return "forward";
    case GraphRole::Backward:
      return "backward";
    case GraphRole::Inference:
      return "inference";
  }
  throw InvariantError("graph: unknown role of a graph");
}

void register_graph_compiler(std::shared_ptr<const GraphCompiler> compiler) {
  if (!compiler) throw ValueError("graph: register_graph_compiler got no compiler; pass one");
  const std::string name(compiler->name());
  KnownCompilers& known = known_compilers();
  const std::lock_guard lock(known.mutex);
  if (!known.by_name.try_emplace(name, std::move(compiler)).second)
    throw ValueError(fmt::format("graph: there is already a compiler named '{}'; choose another name", name));
}

std::vector<std::string> graph_compiler_names() {
  KnownCompilers& known = known_compilers();
  const std::lock_guard lock(known.mutex);
  std::vector<std::string> names;
  for (const auto& [name, compiler] : known.by_name) names.push_back(name);
  return names;
}

std::shared_ptr<const GraphCompiler> graph_compiler(std::string_view name) {
  {
    KnownCompilers& known = known_compilers();
    const std::lock_guard lock(known.mutex);
    if (const auto found = known.by_name.find(name); found != known.by_name.end()) return found->second;
  }
  throw ValueError(describe("graph: compiler", fmt::format("'{}'", name),
                            fmt::format("one of {}", fmt::join(graph_compiler_names(), ", ")),
                            "choose one of these, or register it with register_graph_compiler"));
}

}  // namespace penstock::graph
