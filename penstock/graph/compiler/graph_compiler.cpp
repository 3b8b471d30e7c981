#include "penstock/graph_compiler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/graph/compiler/built_in_compilers.h"
#include "penstock/graph/compiler/execute.h"

namespace penstock::graph {
namespace {

class ExecutorCompiler final : public GraphCompiler {
 public:
  std::string_view name() const override { return kExecutorCompiler; }
  std::shared_ptr<const CompiledGraph> compile(const Graph& graph,
                                               const CompileRequest& request) const override {
    return std::make_shared<const Executor>(graph, ExecutorOptions{.donated_inputs = request.donated_inputs});
  }
};

struct KnownCompilers {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const GraphCompiler>, std::less<>> by_name{
      {std::string(kExecutorCompiler), std::make_shared<const ExecutorCompiler>()},
      {std::string(kFusedCompiler), make_fused_compiler()}};
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
  if (name.empty()) throw ValueError("graph: register_graph_compiler got a compiler without a name; name it");
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
  const std::vector<std::string> names = graph_compiler_names();
  const std::string nearest = nearest_name(name, names);
  throw ValueError(describe("graph: compiler", quote(name), fmt::format("one of {}", fmt::join(names, ", ")),
                            nearest.empty()
                                ? "choose one of these, or register it with register_graph_compiler"
                                : fmt::format("did you mean '{}'? Otherwise choose another of these, or "
                                              "register it with register_graph_compiler",
                                              nearest)));
}

}  // namespace penstock::graph
