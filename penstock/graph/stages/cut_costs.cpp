// Costs of nodes, bytes at each place, and the automatic cut.
#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <numeric>
#include <string_view>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/stages/cut_places.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

std::int64_t memory_bytes(const Geometry& geometry) {
  return geometry.numel() * static_cast<std::int64_t>(c10::elementSize(geometry.dtype));
}

const Geometry* argument_geometry(const Graph& graph, const Node& node, std::size_t argument) {
  if (argument >= node.arguments.size()) return nullptr;
  const ValueId value = node.arguments[argument].value();
  return value == kNoValue ? nullptr : &graph[value].geometry;
}

const Geometry* result_of(const Graph& graph, const Node& node) {
  if (node.results.empty()) return nullptr;
  const ValueId value = node.results[0].value();
  return value == kNoValue ? nullptr : &graph[value].geometry;
}

double sizes_from(const Geometry& geometry, std::size_t first) {
  double product = 1;
  for (std::size_t i = first; i < geometry.sizes.size(); ++i)
    product *= static_cast<double>(geometry.sizes[i]);
  return product;
}

// Multiplications and additions of products; 0 for any other operator.
double products_of(const Graph& graph, const Node& node) {
  const std::string& name = node.op.operator_name().name;
  const Geometry* result = result_of(graph, node);
  if (!result) return 0;
  const auto along_last_of = [&](std::size_t argument) {
    const Geometry* left = argument_geometry(graph, node, argument);
    return left && !left->sizes.empty()
               ? 2.0 * static_cast<double>(result->numel()) * static_cast<double>(left->sizes.back())
               : 0.0;
  };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::mv" || name == "aten::matmul" ||
      name == "aten::linear")
    return along_last_of(0);
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmv") return along_last_of(1);
  if (name.find("convolution") != std::string::npos) {
    const Geometry* weight = argument_geometry(graph, node, 1);
    return weight ? 2.0 * static_cast<double>(result->numel()) * sizes_from(*weight, 1) : 0.0;
  }
  if (name.find("attention") != std::string::npos) {
    // Query [..., L, D] and key [..., S, D]: two products of L x S x D each.
    const Geometry *query = argument_geometry(graph, node, 0), *key = argument_geometry(graph, node, 1);
    if (query && key && key->sizes.size() >= 2)
      return 4.0 * static_cast<double>(query->numel()) *
             static_cast<double>(key->sizes[key->sizes.size() - 2]);
  }
  return 0;
}

}  // namespace

std::vector<double> node_costs(const Graph& graph) {
  std::vector<double> costs;
  costs.reserve(graph.nodes.size());
  for (const Node& node : graph.nodes) {
    double cost = products_of(graph, node);
    if (!traits_of(node.op).pure_view) {
      std::int64_t bytes = 0;
      for_each_value(node.arguments, [&](ValueId value) { bytes += memory_bytes(graph[value].geometry); });
      for_each_value(node.results, [&](ValueId value) { bytes += memory_bytes(graph[value].geometry); });
      cost += kCostOfByte * static_cast<double>(bytes);
    }
    costs.push_back(cost);
  }
  return costs;
}

std::vector<std::int64_t> bytes_across(const ForwardTrace& trace, const std::vector<InputKind>& kinds) {
  const Graph& graph = trace.graph;
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> made(graph.values.size(), kNever), used(graph.values.size(), 0);
  for (std::size_t i = 0; i < graph.inputs.size(); ++i)
    if (kinds.at(i) == InputKind::Positional) made[index_of(graph.inputs[i].value)] = 0;
  const auto use = [&](ValueId value, std::size_t node) {
    used[index_of(value)] = std::max(used[index_of(value)], node);
  };
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for_each_value(graph.nodes[i].arguments, [&](ValueId value) { use(value, i); });
    for_each_value(graph.nodes[i].results, [&](ValueId value) {
      std::size_t& first = made[index_of(value)];
      if (first == kNever) first = i;
    });
  }
  for (const CustomFunction& function : trace.functions)
    function.for_each_use([&](ValueId value) { use(value, function.end == 0 ? 0 : function.end - 1); });
  for_each_value(graph.outputs, [&](ValueId value) { use(value, graph.nodes.size() - 1); });
  // Of inputs among state and keyword arguments nothing is sent.
  std::vector<std::int64_t> change(graph.nodes.size() + 1, 0);
  for (std::size_t value = 0; value < graph.values.size(); ++value) {
    if (made[value] == kNever || used[value] <= made[value]) continue;
    const std::int64_t bytes = memory_bytes(graph.values[value].geometry);
    change[made[value] + 1] += bytes;
    if (used[value] + 1 < change.size()) change[used[value] + 1] -= bytes;
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  return change;
}

namespace {

class Search {
 public:
  Search(const CutPlaces& places, const std::vector<double>& costs, const std::vector<std::int64_t>& bytes)
      : bytes_(bytes) {
    sums_.push_back(0);
    candidates_.push_back(0);
    for (std::size_t i = 0; i < costs.size(); ++i) {
      sums_.push_back(sums_.back() + costs[i]);
      if (i > 0 && places.why_not(i).empty()) candidates_.push_back(i);
    }
    candidates_.push_back(costs.size());
  }

  std::size_t most_stages() const { return candidates_.size() - 1; }

  // The least cost of the most expensive stage.
  double least(int stages) const {
    const std::size_t count = candidates_.size();
    std::vector<double> best(count);
    for (std::size_t j = 0; j < count; ++j) best[j] = cost(0, j);
    for (int stage = 1; stage < stages; ++stage) {
      std::vector<double> next(count, kNever);
      // The best place of the last border moves right with the end.
      std::size_t i = static_cast<std::size_t>(stage);
      for (std::size_t j = static_cast<std::size_t>(stage) + 1; j < count; ++j) {
        while (i + 1 < j && std::max(best[i + 1], cost(i + 1, j)) <= std::max(best[i], cost(i, j))) ++i;
        next[j] = std::max(best[i], cost(i, j));
      }
      best = std::move(next);
    }
    return best.back();
  }

  // The fewest bytes of all cuts whose stages cost at most `limit`.
  std::vector<std::size_t> fewest_bytes(int stages, double limit) const {
    const std::size_t count = candidates_.size();
    std::vector<double> sent(count, kNever);
    for (std::size_t j = 1; j < count; ++j)
      if (cost(0, j) <= limit) sent[j] = bytes_at(j);
    std::vector<std::vector<std::size_t>> from;
    for (int stage = 1; stage < stages; ++stage) {
      std::vector<double> next(count, kNever);
      std::vector<std::size_t>& chosen = from.emplace_back(count, 0);
      std::deque<std::size_t> window;  // ascending by bytes: the first is the best that is left
      for (std::size_t j = 1; j < count; ++j) {
        const std::size_t i = j - 1;
        while (!window.empty() && sent[window.back()] >= sent[i]) window.pop_back();
        window.push_back(i);
        while (!window.empty() && cost(window.front(), j) > limit) window.pop_front();
        if (window.empty() || sent[window.front()] == kNever) continue;
        next[j] = sent[window.front()] + bytes_at(j);
        chosen[j] = window.front();
      }
      sent = std::move(next);
    }
    std::vector<std::size_t> places;
    std::size_t j = count - 1;
    for (auto chosen = from.rbegin(); chosen != from.rend(); ++chosen) {
      j = (*chosen)[j];
      places.insert(places.begin(), candidates_[j]);
    }
    return places;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  double cost(std::size_t from, std::size_t to) const {
    return sums_[candidates_[to]] - sums_[candidates_[from]];
  }
  double bytes_at(std::size_t candidate) const {
    const std::size_t place = candidates_[candidate];
    return place + 1 == sums_.size() ? 0.0 : static_cast<double>(bytes_[place]);
  }

  const std::vector<std::int64_t>& bytes_;
  std::vector<double> sums_;             // of the costs before each place
  std::vector<std::size_t> candidates_;  // places, with both ends
};

}  // namespace

std::vector<std::size_t> automatic_places(const CutPlaces& places, const std::vector<double>& costs,
                                          const std::vector<std::int64_t>& bytes, int stages,
                                          const AutomaticCut& how) {
  if (stages < 1)
    throw ValueError(describe("trace_pipeline: number of stages", std::to_string(stages), "at least 1"));
  const Search search(places, costs, bytes);
  if (static_cast<std::size_t>(stages) > search.most_stages())
    throw ValueError(
        describe("trace_pipeline: number of stages", std::to_string(stages),
                 fmt::format("at most {}: the forward has {} operators, and can be cut at {} places",
                             search.most_stages(), costs.size(), search.most_stages() - 1),
                 "ask for fewer stages"));
  // A little more than the least, for rounding in the sums.
  return search.fewest_bytes(stages, search.least(stages) * (1 + std::max(how.tolerance, 1e-9)));
}

}  // namespace penstock::graph
