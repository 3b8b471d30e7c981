// The graph of a pipe: made from a cut, checked, printed, drawn.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/pipeline/traced/pipe_state.h"

namespace penstock {

using graph::ValueId;

namespace {

class OuterGraph {
 public:
  explicit OuterGraph(const PipeState& pipe)
      : variant_(pipe.main()), graph_(variant_.trace.graph), last_(pipe.stages() - 1) {}

  PipeGraph run() {
    find_modules();
    for (const graph::Hop& hop : variant_.cut.hops) origin_.try_emplace(hop.value, hop.from);
    add_arguments();
    for (int stage = 0; stage <= last_; ++stage) add_stage(stage);
    PipeNode output{PipeNode::Kind::Output, "output", {}, -1, 0, {}, {}};
    graph::for_each_value(graph_.outputs, [&](ValueId value) {
      // A parameter that is returned belongs to no stage's results.
      if (const auto node = node_of_.find(value); node != node_of_.end())
        output.inputs.push_back(node->second);
    });
    found_.nodes.push_back(std::move(output));
    return std::move(found_);
  }

 private:
  void find_modules() {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i)
      graph::for_each_value(graph_.nodes[i].results, [&](ValueId value) {
        module_of_.try_emplace(value, variant_.trace.module_of_node[i]);
      });
  }

  void add(ValueId value, PipeNode node) {
    node.record = record_text(variant_.geometry(value));
    node_of_[value] = found_.nodes.size();
    found_.nodes.push_back(std::move(node));
  }

  void add_arguments() {
    for (std::size_t i = 0; i < graph_.inputs.size(); ++i)
      if (variant_.kinds[i] != graph::InputKind::State)
        add(graph_.inputs[i].value, {PipeNode::Kind::Argument, graph_.inputs[i].name, {}, -1, i, {}, {}});
  }

  std::set<ValueId> used_in(const graph::CutStage& stage) const {
    std::set<ValueId> used;
    const auto use = [&](ValueId value) { used.insert(value); };
    for (std::size_t i = stage.first; i < stage.end; ++i)
      graph::for_each_value(graph_.nodes[i].arguments, use);
    for (const std::size_t function : stage.functions) variant_.trace.functions[function].for_each_use(use);
    return used;
  }

  void add_stage(int index) {
    const graph::CutStage& stage = variant_.cut.stages[static_cast<std::size_t>(index)];
    PipeNode call{PipeNode::Kind::Stage, fmt::format("stage_{}", index), {}, index, 0, {}, {}};
    // What it takes is there already: an argument, or a result of an earlier stage.
    for (const ValueId value : used_in(stage))
      if (const auto node = node_of_.find(value); node != node_of_.end()) call.inputs.push_back(node->second);
    const std::size_t call_node = found_.nodes.size();
    found_.nodes.push_back(std::move(call));
    std::size_t number = 0;
    const auto add_item = [&](ValueId value) {
      if (node_of_.contains(value)) return;
      add(value, {PipeNode::Kind::Item,
                  fmt::format("stage_{}[{}]", index, number),
                  {call_node},
                  index,
                  number,
                  {},
                  module_of(value)});
      ++number;
    };
    for (const auto& [value, from] : origin_)
      if (from == index) add_item(value);
    if (index == last_) graph::for_each_value(graph_.outputs, [&](ValueId value) { add_item(value); });
  }

  std::string module_of(ValueId value) const {
    const auto found = module_of_.find(value);
    return found == module_of_.end() ? std::string() : found->second;
  }

  const PipeVariant& variant_;
  const graph::Graph& graph_;
  const int last_;
  std::map<ValueId, int> origin_;  // of values that travel: the stage that has them first
  std::map<ValueId, std::string> module_of_;
  std::map<ValueId, std::size_t> node_of_;
  PipeGraph found_;
};

std::string line_of(const PipeGraph& graph, const PipeNode& node) {
  std::vector<std::string> inputs;
  for (const std::size_t input : node.inputs)
    inputs.push_back(input < graph.nodes.size() ? graph.nodes[input].name : fmt::format("node {}", input));
  const std::string taken = fmt::format("{}", fmt::join(inputs, ", "));
  switch (node.kind) {
    case PipeNode::Kind::Argument:
      return fmt::format("{}: {}", node.name, node.record);
    case PipeNode::Kind::Stage:
      return fmt::format("{} = stage {}({})", node.name, node.stage, taken);
    case PipeNode::Kind::Item:
      return fmt::format("{}: {}{}", node.name, node.record,
                         node.module.empty() ? std::string() : fmt::format("  # of '{}'", node.module));
    case PipeNode::Kind::Output:
      return fmt::format("return ({})", taken);
  }
  throw InvariantError("pipe: unknown kind of node");
}

}  // namespace

std::string record_text(const graph::Geometry& geometry) { return graph::to_text(geometry); }

PipeGraph outer_graph(const PipeState& pipe) { return OuterGraph(pipe).run(); }

int PipeGraph::stage_of(std::string_view name) const {
  std::vector<std::string> names;
  for (const PipeNode& node : nodes) {
    if (node.kind != PipeNode::Kind::Stage) continue;
    if (node.name == name) return node.stage;
    names.push_back(node.name);
  }
  throw PipeliningMetadataError(describe("pipe: a stage", fmt::format("'{}'", name),
                                         fmt::format("one of '{}'", fmt::join(names, "', '")),
                                         "names are those of the nodes of Pipe::outer()"));
}

std::vector<std::size_t> PipeGraph::users(std::size_t node) const {
  std::vector<std::size_t> found;
  for (std::size_t i = node + 1; i < nodes.size(); ++i)
    if (std::find(nodes[i].inputs.begin(), nodes[i].inputs.end(), node) != nodes[i].inputs.end())
      found.push_back(i);
  return found;
}

void PipeGraph::verify(int stages) const {
  int found = 0;
  std::set<std::pair<std::size_t, std::size_t>> items;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const PipeNode& node = nodes[i];
    const auto refuse = [&](const std::string& actual, const std::string& expected) {
      throw PipeliningMetadataError(describe(fmt::format("pipe: line '{}'", line_of(*this, node)), actual,
                                             expected, "trace the model again with trace_pipeline"));
    };
    for (const std::size_t input : node.inputs) {
      if (input >= i) refuse(fmt::format("takes node {}", input), "nodes before it only");
      const PipeNode& from = nodes[input];
      if (node.kind == PipeNode::Kind::Item) {
        if (from.kind != PipeNode::Kind::Stage || from.stage != node.stage || node.inputs.size() != 1)
          refuse(fmt::format("an item of {}", from.name), "an item of its stage alone");
      } else if (from.kind != PipeNode::Kind::Argument && from.kind != PipeNode::Kind::Item) {
        refuse(fmt::format("takes {}", from.name), "arguments and results of earlier stages only");
      }
    }
    switch (node.kind) {
      case PipeNode::Kind::Argument:
        if (!node.inputs.empty()) refuse("an argument that takes something", "an argument");
        break;
      case PipeNode::Kind::Stage:
        if (node.stage != found) refuse(fmt::format("stage {}", node.stage), fmt::format("stage {}", found));
        ++found;
        break;
      case PipeNode::Kind::Item:
        if (node.inputs.empty()) refuse("an item of nothing", "an item of a stage");
        if (!items.emplace(node.inputs[0], node.index).second)
          refuse(fmt::format("result {} again", node.index), "each result once");
        break;
      case PipeNode::Kind::Output:
        if (i + 1 != nodes.size()) refuse("an output before the end", "one output, which is the last node");
        break;
    }
  }
  if (nodes.empty() || nodes.back().kind != PipeNode::Kind::Output)
    throw PipeliningMetadataError(describe("pipe: the last node", "none that is an output", "the output"));
  if (found != stages)
    throw PipeliningMetadataError(describe("pipe: calls of stages", std::to_string(found),
                                           std::to_string(stages), "use a graph of the same pipe"));
}

std::string PipeGraph::to_text() const {
  std::string text;
  for (const PipeNode& node : nodes) text += line_of(*this, node) + "\n";
  return text;
}

std::string PipeGraph::to_dot() const {
  const auto quoted = [](const std::string& text) {
    std::string safe;
    for (const char c : text) safe += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return safe;
  };
  std::string text = "digraph pipe {\n  rankdir=TB;\n  node [shape=box, fontname=\"sans-serif\"];\n";
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const PipeNode& node = nodes[i];
    const char* style = node.kind == PipeNode::Kind::Stage  ? "style=filled, fillcolor=\"#cfe2f3\""
                        : node.kind == PipeNode::Kind::Item ? "shape=ellipse"
                                                            : "shape=plaintext";
    text += fmt::format("  n{} [label=\"{}{}\", {}];\n", i, quoted(node.name),
                        node.record.empty() ? std::string() : "\\n" + quoted(node.record), style);
    for (const std::size_t input : node.inputs) text += fmt::format("  n{} -> n{};\n", input, i);
  }
  return text + "}\n";
}

}  // namespace penstock
