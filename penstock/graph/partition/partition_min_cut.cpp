#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/boykov_kolmogorov_max_flow.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/graph/partition/cheap_operators.h"
#include "penstock/graph/partition/partition.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

using EdgeOfFlow = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>::edge_descriptor;
using FlowGraph = boost::adjacency_list<
    boost::vecS, boost::vecS, boost::directedS,
    boost::property<boost::vertex_color_t, boost::default_color_type,
                    boost::property<boost::vertex_distance_t, long,
                                    boost::property<boost::vertex_predecessor_t, EdgeOfFlow>>>,
    boost::property<boost::edge_capacity_t, std::int64_t,
                    boost::property<boost::edge_residual_capacity_t, std::int64_t,
                                    boost::property<boost::edge_reverse_t, EdgeOfFlow>>>>;

// Large, but many of them can be added without overflow.
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / (1 << 20);

// Random operators with one pass over memory. Drawing costs more than computing, but less than the memory of
// what was drawn.
constexpr std::array kCheapRandom = std::to_array<std::string_view>(
    {"aten::_fused_dropout", "aten::bernoulli", "aten::cauchy", "aten::exponential", "aten::geometric",
     "aten::log_normal", "aten::native_dropout", "aten::normal", "aten::normal_functional", "aten::rand",
     "aten::rand_like", "aten::randint", "aten::randint_like", "aten::randn", "aten::randn_like",
     "aten::random", "aten::rrelu_with_noise_functional", "aten::uniform"});

bool is_recomputable(const Node& node) {
  if (must_run(node)) return false;
  if (traits_of(node.op).pure_view) return true;
  if (const auto inside = operator_inside(node.op)) {
    const std::string& drawing = inside->op.operator_name().name;
    return std::find(kCheapRandom.begin(), kCheapRandom.end(), drawing) != kCheapRandom.end();
  }
  return is_cheap(node);
}

// Nodes of backward that do not depend on tangents: forward may run them instead, if their results are
// smaller than their arguments.
std::vector<char> nodes_without_tangents(const JointGraph& joint,
                                         const detail::ForwardBackwardSplit& halves) {
  const Graph& graph = joint.graph;
  std::vector<char> early(graph.nodes.size(), 0), depends(graph.values.size(), 0);
  const std::size_t states = joint.first_state_input(),
                    backward_states = states + joint.states_of(Phase::Forward);
  for (std::size_t i = joint.primals; i < graph.inputs.size(); ++i)
    if (i < states || i >= backward_states) depends[index_of(graph.inputs[i].value)] = 1;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (halves.in_forward[i]) continue;
    bool tied = must_run(node);
    for_each_value(node.arguments, [&](ValueId value) { tied |= depends[index_of(value)] != 0; });
    if (tied) for_each_value(node.results, [&](ValueId value) { depends[index_of(value)] = 1; });
    early[i] = !tied;
  }
  return early;
}

// Each value of forward becomes two vertices joined by an edge whose capacity is the cost of saving it; users
// are connected to the second.
class SavedValuesCut {
 public:
  SavedValuesCut(const JointGraph& joint, const detail::ForwardBackwardSplit& halves,
                 const std::vector<char>& early)
      : joint_(joint),
        halves_(halves),
        early_(early),
        flow_(2 * joint.graph.values.size() + 2),
        source_(2 * joint.graph.values.size()),
        sink_(source_ + 1) {}

  std::vector<char> run() {
    const Graph& graph = joint_.graph;
    const std::vector<char> used = detail::used_by_backward(joint_, halves_);
    for (std::size_t i = 0; i < graph.values.size(); ++i) {
      if (!halves_.from_forward[i]) continue;
      const Geometry& geometry = graph.values[i].geometry;
      // One more than its bytes: among equal cuts prefers the one with fewer tensors.
      connect(before(i), after(i),
              geometry.numel() * static_cast<std::int64_t>(c10::elementSize(geometry.dtype)) + 1);
      if (used[i]) connect(after(i), sink_, kUnlimited);
    }
    const auto begin_at = [&](std::size_t input) {
      connect(source_, before(index_of(graph.inputs[input].value)), kUnlimited);
    };
    for (std::size_t i = 0; i < joint_.primals; ++i) begin_at(i);
    for (std::size_t i = 0; i < joint_.states_of(Phase::Forward); ++i)
      begin_at(joint_.first_state_input() + i);
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      if (halves_.in_forward[i]) connect_node(graph.nodes[i], early_[i] != 0);
    boost::boykov_kolmogorov_max_flow(flow_, source_, sink_);
    const std::vector<char> reached = reach();
    std::vector<char> saved(graph.values.size(), 0);
    for (std::size_t i = 0; i < graph.values.size(); ++i)
      saved[i] = halves_.from_forward[i] && reached[before(i)] && !reached[after(i)];
    return saved;
  }

 private:
  using Vertex = std::size_t;
  static Vertex before(std::size_t value) { return 2 * value; }
  static Vertex after(std::size_t value) { return 2 * value + 1; }

  void connect(Vertex from, Vertex to, std::int64_t capacity) {
    const EdgeOfFlow there = boost::add_edge(from, to, flow_).first,
                     back = boost::add_edge(to, from, flow_).first;
    boost::put(boost::edge_capacity, flow_, there, capacity);
    boost::put(boost::edge_capacity, flow_, back, 0);
    boost::put(boost::edge_reverse, flow_, there, back);
    boost::put(boost::edge_reverse, flow_, back, there);
  }

  // `early`: backward is the first to compute it, if forward does not.
  void connect_node(const Node& node, bool early) {
    const bool again = early || is_recomputable(node);
    for_each_value(node.results, [&](ValueId result) {
      if (!again) return connect(source_, before(index_of(result)), kUnlimited);
      for_each_value(node.arguments, [&](ValueId argument) {
        if (!halves_.is_constant[index_of(argument)])
          connect(after(index_of(argument)), before(index_of(result)), kUnlimited);
      });
    });
  }

  // What the source can still reach at maximum flow.
  std::vector<char> reach() const {
    std::vector<char> reached(boost::num_vertices(flow_), 0);
    std::vector<Vertex> open{source_};
    reached[source_] = 1;
    while (!open.empty()) {
      const Vertex from = open.back();
      open.pop_back();
      for (auto [edge, end] = boost::out_edges(from, flow_); edge != end; ++edge) {
        const Vertex to = boost::target(*edge, flow_);
        if (reached[to] || boost::get(boost::edge_residual_capacity, flow_, *edge) <= 0) continue;
        reached[to] = 1;
        open.push_back(to);
      }
    }
    return reached;
  }

  const JointGraph& joint_;
  const detail::ForwardBackwardSplit& halves_;
  const std::vector<char>& early_;
  FlowGraph flow_;
  Vertex source_, sink_;
};

}  // namespace

Partition partition_min_cut(const JointGraph& joint) {
  const Graph& graph = joint.graph;
  detail::ForwardBackwardSplit halves = detail::forward_backward_split(joint);
  const std::vector<char> early = nodes_without_tangents(joint, halves);
  detail::ForwardBackwardSplit widest = halves;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!early[i]) continue;
    widest.in_forward[i] = 1;
    for_each_value(graph.nodes[i].results, [&](ValueId value) { widest.from_forward[index_of(value)] = 1; });
  }
  const std::vector<char> saved = SavedValuesCut(joint, widest, early).run();
  // Forward runs those that produce saved values, and what these need.
  std::vector<char> needed = saved;
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    bool needs = false;
    for_each_value(graph.nodes[i].results, [&](ValueId value) { needs |= needed[index_of(value)] != 0; });
    if (!early[i] || !needs) continue;
    halves.in_forward[i] = 1;
    for_each_value(graph.nodes[i].results, [&](ValueId value) { halves.from_forward[index_of(value)] = 1; });
    for_each_value(graph.nodes[i].arguments, [&](ValueId value) { needed[index_of(value)] = 1; });
  }
  return detail::split(joint, halves, saved);
}

}  // namespace penstock::graph
