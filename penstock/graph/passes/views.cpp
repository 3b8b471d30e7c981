// "views": removes views that are another tensor of the graph again.
//
//   %2 = transpose(%1, 0, 1); %3 = transpose(%2, 0, 1)      users of %3 use %1
//   %2 = expand(%1, [4, 3])    of a float32[4, 3]           users of %2 use %1
//   %2 = view(%1, [12]); %3 = view(%2, [3, 4])              %3 is a view of %1
//
// What a view shows follows from its memory, sizes, strides and offset: if all of these are those of another
// view of the same tensor, or of the tensor itself, both are the same. Views of different results of
// operators are never compared, even if they share memory: the result of a wait is in the memory of the
// tensor that it waits for, and must not be exchanged for it. Outputs stay as they are.
#include <ATen/TensorUtils.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "penstock/base/hash.h"
#include "penstock/graph/passes/replacement.h"
#include "penstock/graph/passes/standard_passes.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

constexpr std::string_view kViewOperator[] = {"aten::view"};

class ViewMerger {
 public:
  explicit ViewMerger(Graph& graph)
      : graph_(graph),
        memory_(graph),
        replaced_(graph),
        view_operator_(kViewOperator),
        facts_(graph.values.size()) {}

  void run() {
    std::vector<char> gone(graph_.nodes.size(), 0);
    bool any = false;
    count_uses();
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      replaced_.translate(node.arguments);
      for_each_value(node.results, [&](ValueId value) { facts_[index_of(value)].phase = node.phase; });
      if (!is_view(node)) continue;
      shorten(node);
      if (const ValueId same = find_same(node); same != kNoValue) {
        replaced_.put(same, node.results[0].values[0]);
        any = true;
        gone[i] = 1;
      }
    }
    if (!any) return;
    replaced_.finish();
    erase_nodes(graph_, gone);
  }

 private:
  struct Facts {
    ValueId root = kNoValue;   // of a view: the tensor at the start of its chain of views
    ValueId inner = kNoValue;  // of the result of aten::view: its argument
    std::uint32_t uses = 0;
    Phase phase = Phase::Forward;
  };
  Facts& facts(ValueId value) { return facts_[index_of(value)]; }
  ValueId root_of(ValueId value) {
    const ValueId root = facts(value).root;
    return root == kNoValue ? value : root;
  }

  // LibTorch's own view operators; those of others may do more than their schema says.
  static bool is_view(const Node& node) {
    const OperatorTraits& traits = traits_of(node.op);
    return traits.pure_view && node.results.size() == 1 && node.results[0].value() != kNoValue &&
           !node.arguments.empty() && node.arguments[0].value() != kNoValue &&
           traits.name.compare(0, 6, "aten::") == 0;
  }

  void count_uses() {
    for (const Node& node : graph_.nodes)
      for_each_value(node.arguments, [&](ValueId value) { ++facts(value).uses; });
    for_each_value(graph_.outputs, [&](ValueId value) { ++facts(value).uses; });
  }

  // A view of a view that has no other use becomes a view of what that is a view of.
  void shorten(Node& node) {
    if (view_operator_.of(node.op) != 0) return;
    ValueId& viewed = node.arguments[0].values[0];
    const ValueId inner = facts(viewed).inner;
    facts(node.results[0].values[0]).inner = viewed;
    if (inner == kNoValue || facts(viewed).uses != 1 || facts(viewed).phase != node.phase) return;
    const Geometry &from = graph_[inner].geometry, &to = graph_[node.results[0].values[0]].geometry;
    if (from.symbolic != kNotSymbolic || to.symbolic != kNotSymbolic || from.dtype != to.dtype) return;
    const auto strides = at::detail::computeStride(at::IntArrayRef(from.sizes), at::IntArrayRef(from.strides),
                                                   at::IntArrayRef(to.sizes));
    if (!strides || at::IntArrayRef(*strides) != at::IntArrayRef(to.strides)) return;
    --facts(viewed).uses;
    ++facts(inner).uses;
    viewed = inner;
    facts(node.results[0].values[0]).inner = inner;
  }

  // The tensor that the result of a view is again, or kNoValue.
  ValueId find_same(const Node& node) {
    const ValueId result = node.results[0].values[0], root = root_of(node.arguments[0].values[0]);
    const Geometry& geometry = graph_[result].geometry;
    facts(result).root = root;
    const bool certain = holds_for_all_sizes(graph_, geometry);
    if (!certain) return kNoValue;
    const bool may_go = !memory_.is_output(result);
    if (may_go && graph_[root].geometry == geometry) return root;
    HashBuilder hash;
    hash.add(static_cast<std::int32_t>(root)).add(geometry.storage_offset);
    for (const std::int64_t size : geometry.sizes) hash.add(size);
    for (const std::int64_t stride : geometry.strides) hash.add(stride);
    const std::size_t key = hash.value();
    if (may_go)
      for (auto [entry, end] = known_.equal_range(key); entry != end; ++entry) {
        const ValueId other = entry->second;
        // What backward makes again of a tensor that it has need not be saved by forward.
        if (root_of(other) == root && graph_[other].geometry == geometry && facts(other).phase == node.phase)
          return other;
      }
    known_.emplace(key, result);
    return kNoValue;
  }

  Graph& graph_;
  VisibleMemory memory_;
  Replacement replaced_;
  OperatorNumbers view_operator_;
  std::vector<Facts> facts_;  // by value
  std::unordered_multimap<std::size_t, ValueId> known_;
};

class Views final : public GraphPass {
 public:
  std::string_view name() const override { return "views"; }
  bool takes_symbols() const override { return true; }
  Graph run(Graph graph, const PassContext&) const override {
    ViewMerger(graph).run();
    return graph;
  }
};

}  // namespace

PassPointer views_pass() { return std::make_shared<const Views>(); }

}  // namespace penstock::graph
