#include "penstock/graph/stages/cut_places.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

// The accesses to one memory.
struct Accesses {
  std::optional<std::size_t> made;  // by this node; empty: it is an input or a constant
  std::optional<InputKind> input;
  std::optional<std::size_t> first, last;  // nodes that take or return it
  std::optional<std::size_t> first_write, last_write;

  void touch(std::size_t node) {
    if (!first) first = node;
    last = node;
  }
};

std::vector<Accesses> accesses_of(const ForwardTrace& trace, const std::vector<InputKind>& kinds) {
  const Graph& graph = trace.graph;
  std::vector<Accesses> all(static_cast<std::size_t>(graph.storages));
  const auto of = [&](ValueId value) -> Accesses& { return all[index_of(graph[value].storage)]; };
  for (std::size_t i = 0; i < graph.inputs.size(); ++i) of(graph.inputs[i].value).input = kinds.at(i);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    for_each_value(node.arguments, [&](ValueId value) { of(value).touch(i); });
    for_each_value(node.results, [&](ValueId value) {
      Accesses& memory = of(value);
      if (!memory.first && !memory.input) memory.made = i;
      memory.touch(i);
    });
    for (const std::size_t argument : written_arguments(node))
      for (const ValueId value : node.arguments[argument].values) {
        if (value == kNoValue) continue;
        Accesses& memory = of(value);
        if (!memory.first_write) memory.first_write = i;
        memory.last_write = i;
      }
  }
  return all;
}

}  // namespace

CutPlaces::CutPlaces(const ForwardTrace& trace, const std::vector<InputKind>& kinds)
    : trace_(trace), why_not_(trace.graph.nodes.size()) {
  forbid_torn_memory(kinds);
  forbid_torn_functions();
}

void CutPlaces::forbid(std::size_t after, std::size_t until, const std::string& why) {
  for (std::size_t place = after + 1; place <= until && place < why_not_.size(); ++place)
    if (why_not_[place].empty()) why_not_[place] = why;
}

void CutPlaces::forbid_torn_memory(const std::vector<InputKind>& kinds) {
  for (const Accesses& memory : accesses_of(trace_, kinds)) {
    if (!memory.last_write) continue;
    const std::size_t write = *memory.last_write;
    if (memory.made) {
      // Whoever reads it after the last write gets what was written.
      forbid(*memory.made, write,
             fmt::format("{} writes in place what {} has made, which would be in an earlier stage",
                         trace_.line(write), trace_.line(*memory.made)));
    } else if (memory.input == InputKind::Positional) {
      forbid(0, *memory.last,
             fmt::format("{} writes an argument, which only the first stage has", trace_.line(write)));
    } else {
      forbid(*memory.first, *memory.last,
             fmt::format("{} writes a buffer or argument that {} uses, which would be in another stage",
                         trace_.line(write),
                         trace_.line(*memory.first == write ? *memory.last : *memory.first)));
    }
  }
}

void CutPlaces::forbid_torn_functions() {
  for (const CustomFunction& function : trace_.functions)
    if (function.end > function.first + 1)
      forbid(function.first, function.end - 1,
             fmt::format("{} belongs to a call of the autograd function {}, which is in one stage",
                         trace_.line(function.first), function.name));
}

std::size_t CutPlaces::at(const Split& split, const std::vector<std::string>& known) const {
  std::optional<std::size_t> first, last;
  for (std::size_t i = 0; i < trace_.module_of_node.size(); ++i)
    if (is_inside(trace_.module_of_node[i], split.module)) {
      if (!first) first = i;
      last = i;
    }
  if (first) return split.side == Split::Side::Before ? *first : *last + 1;
  const std::string what = fmt::format("trace_pipeline: a split point is the module '{}'", split.module);
  if (std::find(known.begin(), known.end(), split.module) != known.end())
    throw ValueError(fmt::format(
        "{}, in which no operator ran; split at a module that computes, or let its forward begin with "
        "`const penstock::ModuleScope scope(*this);` if it does",
        what));
  const std::string nearest = nearest_name(split.module, known);
  throw ValueError(fmt::format("{}, which the model does not have; {}", what,
                               nearest.empty() ? std::string("named_modules() has the names of its modules")
                                               : fmt::format("did you mean '{}'?", nearest)));
}

std::vector<std::size_t> CutPlaces::checked(std::vector<std::size_t> places,
                                            std::vector<std::string> names) const {
  std::vector<std::size_t> order(places.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return places[a] < places[b]; });
  std::size_t before = 0;
  std::string name_before = "the beginning";
  std::vector<std::size_t> sorted;
  for (const std::size_t i : order) {
    const std::size_t place = places[i];
    const auto empty_stage = [&](const std::string& from, const std::string& to, std::size_t line) {
      throw ValueError(fmt::format(
          "trace_pipeline: the stage between {} and {} has no operators{}; remove one of the two splits",
          from, to,
          line < nodes() ? fmt::format(" (both are before {})", trace_.line(line)) : std::string()));
    };
    if (place == before) empty_stage(name_before, names[i], place);
    if (place >= nodes()) empty_stage(names[i], "the end", nodes());
    if (!why_not(place).empty())
      throw ValueError(
          fmt::format("trace_pipeline: {} cannot be a border of stages: {}; move the split, or compute "
                      "out of place there",
                      names[i], why_not(place)));
    sorted.push_back(place);
    before = place;
    name_before = names[i];
  }
  return sorted;
}

}  // namespace penstock::graph
