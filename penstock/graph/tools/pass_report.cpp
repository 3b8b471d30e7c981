#include "penstock/graph/tools/pass_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/partition/partition.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

std::size_t bytes_in(const Graph& graph, ValueId value) {
  const Geometry& geometry = graph[value].geometry;
  // An element that is at several places is read once (expand).
  std::size_t elements = 1;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i)
    if (geometry.strides[i] != 0 || geometry.sizes[i] == 0)
      elements *= static_cast<std::size_t>(geometry.sizes[i]);
  return elements * c10::elementSize(geometry.dtype);
}

std::size_t moved_by(const Graph& graph) {
  std::size_t bytes = 0;
  for (const Node& node : graph.nodes) {
    if (traits_of(node.op).pure_view) continue;
    for_each_value(node.arguments, [&](ValueId value) { bytes += bytes_in(graph, value); });
    for_each_value(node.results, [&](ValueId value) { bytes += bytes_in(graph, value); });
  }
  return bytes;
}

Partition split_of(const JointGraph& joint, Partitioner partitioner) {
  return partitioner == Partitioner::MinCut ? partition_min_cut(joint) : partition_default(joint);
}

std::size_t saved_by(const JointGraph& joint, Partitioner partitioner) {
  if (joint.tangents.empty()) return 0;
  const Graph& graph = joint.graph;
  std::set<StorageId> given;
  for (const Placeholder& input : graph.inputs) given.insert(graph[input.value].storage);
  for (const ConstantTensor& constant : graph.constants) given.insert(graph[constant.value].storage);
  std::map<StorageId, std::size_t> largest;
  for (const ValueId value : split_of(joint, partitioner).saved) {
    if (given.contains(graph[value].storage)) continue;
    std::size_t& bytes = largest[graph[value].storage];
    bytes = std::max(bytes, bytes_in(graph, value));
  }
  return std::accumulate(largest.begin(), largest.end(), std::size_t{0},
                         [](std::size_t sum, const auto& entry) { return sum + entry.second; });
}

class PassReport {
 public:
  PassReport(JointGraph joint, const PassReportOptions& options)
      : joint_(std::move(joint)), options_(options) {}

  PassedGraph run(const PassList& passes) {
    const GraphCost before = cost_of(joint_, options_.partitioner);
    const bool inference = joint_.tangents.empty();
    rows_.push_back({"pass", "graph", "nodes", "saved for backward", "moved", "remarks"});
    PassLog log;
    log.observe = [&](const PassRun& done, const Graph& was, const Graph& is) { add(done, was, is); };
    PassContext context;
    context.role = inference ? PassRole::Inference : PassRole::Joint;
    context.static_inputs.resize(options_.static_inputs);
    std::iota(context.static_inputs.begin(), context.static_inputs.end(), std::size_t{0});
    Graph graph = joint_.graph;
    graph = passes.run(std::move(graph), context, &log);
    joint_.graph = std::move(graph);
    const GraphCost after = cost_of(joint_, options_.partitioner);
    if (!inference) {
      Partition halves = split_of(joint_, options_.partitioner);
      context.role = PassRole::Forward;
      passes.run(std::move(halves.forward), context, &log);
      passes.run(std::move(halves.backward),
                 {.role = PassRole::Backward, .static_inputs = {}, .donated_inputs = halves.donated(joint_)},
                 &log);
    }
    std::string text = table();
    text += fmt::format("before: {}\nafter:  {}\n", line_of(before), line_of(after));
    return {std::move(joint_), std::move(text)};
  }

 private:
  void add(const PassRun& done, const Graph& was, const Graph& is) {
    const bool joint = done.role == PassRole::Joint;
    std::string saved;
    if (joint) saved = change(saved_of(was), saved_of(is));
    rows_.push_back({done.pass, std::string(to_text(done.role)),
                     done.nodes_before == done.nodes_after
                         ? std::to_string(done.nodes_before)
                         : fmt::format("{} -> {}", done.nodes_before, done.nodes_after),
                     saved, change(moved_by(was), moved_by(is)), done.note});
  }

  std::size_t saved_of(const Graph& graph) const {
    JointGraph with = joint_;
    with.graph = graph;
    return saved_by(with, options_.partitioner);
  }

  static std::string change(std::size_t was, std::size_t is) {
    return was == is ? format_bytes(was) : fmt::format("{} -> {}", format_bytes(was), format_bytes(is));
  }

  static std::string line_of(const GraphCost& cost) {
    return fmt::format("{} nodes, {} saved for backward, {} moved (estimate)", cost.nodes,
                       format_bytes(cost.saved_bytes), format_bytes(cost.moved_bytes));
  }

  std::string table() const {
    std::vector<std::size_t> width(rows_[0].size(), 0);
    for (const auto& row : rows_)
      for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    std::string text;
    for (const auto& row : rows_) {
      std::string line = " ";
      for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format(" {:<{}} ", row[i], width[i]);
      text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
  }

  JointGraph joint_;
  PassReportOptions options_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace

GraphCost cost_of(const JointGraph& joint, Partitioner partitioner) {
  return {joint.graph.nodes.size(), saved_by(joint, partitioner), moved_by(joint.graph)};
}

PassedGraph with_passes(JointGraph joint, const PassList& passes, const PassReportOptions& options) {
  return PassReport(std::move(joint), options).run(passes);
}

}  // namespace penstock::graph
