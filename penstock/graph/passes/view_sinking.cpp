// "view-sinking": backward makes views of forward's tensors itself, where forward would save several views of
// one tensor, or a view of a parameter, otherwise.
//
//   %4 = relu(%3); %5 = view(%4, [64]); %6 = t(%4)      backward uses %5 and %6: forward saves %4 alone
//   %2 = t(%weight)                                     backward uses %2: forward saves %weight, which a
//                                                       compiler knows as a parameter
//
// A view costs next to nothing, a saved tensor a slot, a version check and an output of the graph; of an
// input that the call writes, each view that is saved would be a copy. The tensor is saved instead only if it
// is not larger than what is saved of it now. Views within a half stay where they are: they occupy no memory,
// and the executor frees each one after its last use.
#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "penstock/graph/passes/replacement.h"
#include "penstock/graph/passes/standard_passes.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

class ViewSinker {
 public:
  explicit ViewSinker(Graph& graph) : graph_(graph), memory_(graph), facts_(graph.values.size()) {}

  void run(const std::vector<std::size_t>& static_inputs) {
    for (const std::size_t input : static_inputs) facts(graph_.inputs.at(input).value).is_static = true;
    if (!find_uses()) return;
    choose();
    if (sunk_ > 0) move();
  }

 private:
  struct Facts {
    ValueId root = kNoValue;  // of a view that forward makes: the tensor at the start of its chain of views
    std::int32_t node = -1;   // that makes it
    bool is_static = false, used_by_backward = false, sinks = false;
  };
  Facts& facts(ValueId value) { return facts_[index_of(value)]; }

  static bool is_view(const Node& node) {
    const OperatorTraits& traits = traits_of(node.op);
    return traits.pure_view && node.results.size() == 1 && node.results[0].value() != kNoValue &&
           !node.arguments.empty() && node.arguments[0].value() != kNoValue && only_one_tensor(node) &&
           traits.name.compare(0, 6, "aten::") == 0;
  }
  static bool only_one_tensor(const Node& node) {
    std::size_t tensors = 0;
    for_each_value(node.arguments, [&](ValueId) { ++tensors; });
    return tensors == 1;
  }

  // Whether backward uses any view of forward.
  bool find_uses() {
    bool any = false;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (node.phase == Phase::Backward) {
        for_each_value(node.arguments, [&](ValueId value) {
          facts(value).used_by_backward = true;
          any |= facts(value).root != kNoValue;
        });
      } else if (is_view(node)) {
        const ValueId viewed = node.arguments[0].value();
        Facts& made = facts(node.results[0].value());
        made.root = facts(viewed).root == kNoValue ? viewed : facts(viewed).root;
        made.node = static_cast<std::int32_t>(i);
      }
    }
    return any;
  }

  static std::int64_t bytes_of(const Geometry& geometry) {
    return geometry.numel() * static_cast<std::int64_t>(c10::elementSize(geometry.dtype));
  }

  void choose() {
    struct Saved {
      std::vector<ValueId> views;
      std::int64_t bytes = 0;
    };
    std::unordered_map<std::int32_t, Saved> saved;  // by root
    std::vector<std::int32_t> roots;                // in order
    for (std::size_t i = 0; i < facts_.size(); ++i) {
      const ValueId value{static_cast<std::int32_t>(i)};
      if (facts_[i].root == kNoValue || !facts_[i].used_by_backward) continue;
      const auto root = static_cast<std::int32_t>(facts_[i].root);
      const auto [entry, is_new] = saved.try_emplace(root);
      if (is_new) roots.push_back(root);
      entry->second.views.push_back(value);
      entry->second.bytes += bytes_of(graph_[value].geometry);
    }
    for (const std::int32_t number : roots) {
      const ValueId root{number};
      const Saved& of_root = saved.at(number);
      const bool root_is_saved = facts(root).used_by_backward;
      const bool saves = root_is_saved || of_root.views.size() > 1 || facts(root).is_static;
      const bool fits = root_is_saved || bytes_of(graph_[root].geometry) <= of_root.bytes;
      // In the memory of an output, autograd distinguishes between the tensors that are saved.
      if (!saves || !fits || memory_.in_output(graph_, root)) continue;
      for (const ValueId view : of_root.views) {
        facts(view).sinks = true;
        ++sunk_;
      }
    }
  }

  // Makes the views again, before their first use in backward.
  void move() {
    std::vector<Node> nodes;
    nodes.reserve(graph_.nodes.size() + sunk_);
    std::map<ValueId, ValueId> again;
    for (Node& node : graph_.nodes) {
      if (node.phase == Phase::Backward)
        for (Operand& operand : node.arguments)
          for (ValueId& value : operand.values)
            if (value != kNoValue && facts_[index_of(value)].sinks) value = make(value, nodes, again);
      nodes.push_back(std::move(node));
      if (nodes.back().phase == Phase::Forward)
        for_each_value(nodes.back().results, [&](ValueId value) {
          if (index_of(value) < facts_.size() && facts_[index_of(value)].node >= 0)
            facts_[index_of(value)].node = static_cast<std::int32_t>(nodes.size() - 1);
        });
    }
    graph_.nodes = std::move(nodes);
  }

  ValueId make(ValueId view, std::vector<Node>& nodes, std::map<ValueId, ValueId>& again) {
    if (facts_[index_of(view)].root == kNoValue) return view;  // the root itself
    if (const auto known = again.find(view); known != again.end()) return known->second;
    Node copy = nodes[static_cast<std::size_t>(facts_[index_of(view)].node)];
    copy.phase = Phase::Backward;
    copy.arguments[0].values[0] = make(copy.arguments[0].values[0], nodes, again);
    const ValueId result = graph_.new_value(graph_[view].geometry, graph_[view].storage);
    copy.results[0].values[0] = result;
    nodes.push_back(std::move(copy));
    again.emplace(view, result);
    return result;
  }

  Graph& graph_;
  VisibleMemory memory_;
  std::vector<Facts> facts_;  // by value
  std::size_t sunk_ = 0;
};

class ViewSinking final : public GraphPass {
 public:
  std::string_view name() const override { return "view-sinking"; }
  bool runs_on(PassRole role) const override { return role == PassRole::Joint; }
  Graph run(Graph graph, const PassContext& context) const override {
    ViewSinker(graph).run(context.static_inputs);
    return graph;
  }
};

}  // namespace

PassPointer view_sinking_pass() { return std::make_shared<const ViewSinking>(); }

}  // namespace penstock::graph
