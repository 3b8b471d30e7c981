#include "penstock/graph/passes/pass_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/names/pass_names.h"
#include "penstock/graph/passes/known_passes.h"
#include "penstock/graph/passes/pass_check.h"

namespace penstock::graph {
namespace {

#ifdef NDEBUG
constexpr bool kAlwaysVerify = false;
#else
constexpr bool kAlwaysVerify = true;
#endif

}  // namespace

void check_disabled_passes(const std::vector<std::string>& names) {
  if (const std::string problem = unknown_pass(names, "graph: disable_passes"); !problem.empty())
    throw ValueError(problem);
}

PassList::PassList(const std::vector<std::string>& disabled, bool verify) : verify_(verify) {
  check_disabled_passes(disabled);
  for (PassPointer& pass : KnownPasses::instance().in_order())
    if (std::find(disabled.begin(), disabled.end(), pass->name()) == disabled.end())
      passes_.push_back(std::move(pass));
}

Graph PassList::run(Graph graph, PassContext context, PassLog* log, bool instead_of_joint) const {
  const bool verifies = verify_ || kAlwaysVerify;
  for (const PassPointer& pass : passes_) {
    if (!pass->runs_on(context.role) && !(instead_of_joint && pass->runs_on(PassRole::Joint))) continue;
    PassRun done{.pass = std::string(pass->name()),
                 .role = context.role,
                 .nodes_before = graph.nodes.size(),
                 .nodes_after = graph.nodes.size(),
                 .note = {},
                 .skipped = false};
    if (graph.table && !pass->takes_symbols()) {
      done.skipped = true;
      done.note = "left out: it does not take graphs whose sizes are symbols";
      if (log) log->runs.push_back(std::move(done));
      continue;
    }
    context.note = [&](const std::string& text) { done.note += (done.note.empty() ? "" : ", ") + text; };
    const bool observed = log != nullptr && log->observe;
    const std::optional<Graph> before = observed || verifies ? std::optional<Graph>(graph) : std::nullopt;
    graph = pass->run(std::move(graph), context);
    if (verifies) check_pass(*before, graph, pass->name());
    done.nodes_after = graph.nodes.size();
    if (observed) log->observe(done, *before, graph);
    if (log) log->runs.push_back(std::move(done));
  }
  return graph;
}

std::string PassList::text() const {
  std::string text;
  for (const PassPointer& pass : passes_) text += fmt::format("{} {}\n", pass->name(), pass->version());
  return text;
}

std::string PassLog::text() const {
  std::string text;
  for (const PassRun& run : runs) {
    if (run.nodes_before == run.nodes_after && run.note.empty()) continue;
    if (!text.empty()) text += "; ";
    text += fmt::format("{} ({}): ", run.pass, to_text(run.role));
    const bool fewer = run.nodes_after <= run.nodes_before;
    if (!run.skipped)
      text += fmt::format("{} nodes {}",
                          fewer ? run.nodes_before - run.nodes_after : run.nodes_after - run.nodes_before,
                          fewer ? "less" : "more");
    if (!run.note.empty()) text += (run.skipped ? "" : ", ") + run.note;
  }
  return text;
}

}  // namespace penstock::graph
