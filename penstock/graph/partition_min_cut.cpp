#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/boykov_kolmogorov_max_flow.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/graph/partition.h"
#include "penstock/torch/operator_traits.h"

namespace penstock::graph {
namespace {

using EdgeOfFlow = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>::edge_descriptor;
using FlowGraph = boost::adjacency_list<
    boost::vecS, boost::vecS, boost::directedS,
    boost::property<boost::vertex_color_t, boost::default_color_type,
                    boost::property<boost::vertex_distance_t, long, boost::property<boost::vertex_predecessor_t, EdgeOfFlow>>>,
    boost::property<boost::edge_capacity_t, std::int64_t,
                    boost::property<boost::edge_residual_capacity_t, std::int64_t, boost::property<boost::edge_reverse_t, EdgeOfFlow>>>>;

// Large, yet many of them can be added up.
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / (1 << 20);

// Pointwise operators: one pass over memory, no more than reading what would have been saved.
constexpr std::array kCheap = std::to_array<std::string_view>(
    {"aten::abs", "aten::add", "aten::bitwise_and", "aten::bitwise_not", "aten::bitwise_or", "aten::clamp", "aten::clamp_max", "aten::clamp_min",
     "aten::clone", "aten::cos", "aten::div", "aten::eq", "aten::erf", "aten::exp", "aten::fill", "aten::full_like", "aten::ge", "aten::gelu", "aten::gt",
     "aten::hardtanh", "aten::le", "aten::leaky_relu", "aten::log", "aten::log1p", "aten::logical_and", "aten::logical_not", "aten::lt", "aten::masked_fill",
     "aten::maximum", "aten::minimum", "aten::mul", "aten::ne", "aten::neg", "aten::ones_like", "aten::pow", "aten::reciprocal", "aten::relu", "aten::rsqrt",
     "aten::rsub", "aten::sigmoid", "aten::sign", "aten::silu", "aten::sin", "aten::softplus", "aten::sqrt", "aten::sub", "aten::tanh", "aten::where",
     "aten::zero", "aten::zeros_like", "aten::_to_copy"});

bool may_be_computed_again(const Node& node) {
  if (is_random(node)) return false;
  if (traits_of(node.op).pure_view) return true;
  const std::string& name = node.op.operator_name().name;
  return std::find(kCheap.begin(), kCheap.end(), name) != kCheap.end();
}

// Each value of forward is two vertices joined by an edge as wide as saving it costs; whoever uses it hangs on the second.
class CutOfSaved {
 public:
  CutOfSaved(const JointGraph& joint, const detail::Halves& halves)
      : joint_(joint), halves_(halves), flow_(2 * joint.graph.values.size() + 2), source_(2 * joint.graph.values.size()), sink_(source_ + 1) {}

  std::vector<char> run() {
    const Graph& graph = joint_.graph;
    const std::vector<char> used = detail::used_by_backward(joint_, halves_);
    for (std::size_t i = 0; i < graph.values.size(); ++i) {
      if (!halves_.from_forward[i]) continue;
      const Geometry& geometry = graph.values[i].geometry;
      // One more than its bytes: of equal cuts the one with fewer tensors.
      connect(before(i), after(i), geometry.numel() * static_cast<std::int64_t>(c10::elementSize(geometry.dtype)) + 1);
      if (used[i]) connect(after(i), sink_, kUnlimited);
    }
    for (std::size_t i = 0; i < joint_.primals; ++i) connect(source_, before(index_of(graph.inputs[i].value)), kUnlimited);
    for (std::size_t i = 0; i < graph.nodes.size(); ++i)
      if (halves_.in_forward[i]) connect_node(graph.nodes[i]);
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
    const EdgeOfFlow there = boost::add_edge(from, to, flow_).first, back = boost::add_edge(to, from, flow_).first;
    boost::put(boost::edge_capacity, flow_, there, capacity);
    boost::put(boost::edge_capacity, flow_, back, 0);
    boost::put(boost::edge_reverse, flow_, there, back);
    boost::put(boost::edge_reverse, flow_, back, there);
  }

  void connect_node(const Node& node) {
    const bool again = may_be_computed_again(node);
    for_each_value(node.results, [&](ValueId result) {
      if (!again) return connect(source_, before(index_of(result)), kUnlimited);
      for_each_value(node.arguments, [&](ValueId argument) {
        if (!halves_.is_constant[index_of(argument)]) connect(after(index_of(argument)), before(index_of(result)), kUnlimited);
      });
    });
  }

  // What the source still reaches when the flow is at its largest.
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
  const detail::Halves& halves_;
  FlowGraph flow_;
  Vertex source_, sink_;
};

}  // namespace

Partition partition_min_cut(const JointGraph& joint) {
  const detail::Halves halves = detail::halves_of(joint);
  return detail::split(joint, halves, CutOfSaved(joint, halves).run());
}

}  // namespace penstock::graph
