#include "penstock/graph_pass.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/names/pass_names.h"
#include "penstock/graph/passes/known_passes.h"
#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {

std::string_view to_text(PassRole role) {
  switch (role) {
    case PassRole::Joint:
      return "joint";
    case PassRole::Forward:
      return "forward";
    case PassRole::Backward:
      return "backward";
    case PassRole::Inference:
      return "inference";
  }
  throw InvariantError("graph: unknown role of a graph");
}

const std::vector<PassPointer>& standard_passes() {
  static const std::vector<PassPointer> passes = {
      constant_folding_pass(),      views_pass(),        algebraic_pass(), cast_removal_pass(),
      common_subexpressions_pass(), view_sinking_pass(), dead_code_pass(), collectives_pass()};
  return passes;
}

KnownPasses& KnownPasses::instance() {
  static KnownPasses known;
  return known;
}

KnownPasses::KnownPasses() {
  for (const PassPointer& pass : standard_passes()) by_name_.emplace(pass->name(), pass);
}

void KnownPasses::add(PassPointer pass, std::string_view before) {
  const std::string name(pass->name());
  const std::lock_guard lock(mutex_);
  if (!add_pass_name(name, before))
    throw ValueError(fmt::format("graph: there is already a pass named '{}'; choose another name", name));
  by_name_.emplace(name, std::move(pass));
}

std::vector<PassPointer> KnownPasses::in_order() const {
  const std::lock_guard lock(mutex_);
  std::vector<PassPointer> passes;
  for (const std::string& name : known_pass_names()) passes.push_back(by_name_.at(name));
  return passes;
}

void register_graph_pass(std::shared_ptr<const GraphPass> pass, std::string_view before) {
  if (!pass) throw ValueError("graph: register_graph_pass got no pass; pass one");
  if (pass->name().empty()) throw ValueError("graph: register_graph_pass got a pass without a name; name it");
  KnownPasses::instance().add(std::move(pass), before);
}

std::vector<std::string> graph_pass_names() { return known_pass_names(); }

}  // namespace penstock::graph
