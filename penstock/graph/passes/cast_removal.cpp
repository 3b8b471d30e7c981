// "cast-removal": removes casts (aten::_to_copy) that change nothing, as autocast makes them.
//
//   a cast to the dtype that the tensor has              users of the result use the tensor
//   bfloat16 -> float32 -> bfloat16                      users of the result use the bfloat16 tensor
//   bfloat16 -> float32 -> float16                       one cast from bfloat16 to float16
//   two casts of one tensor to one dtype                 the first one, if their other arguments differ, too
//
// A cast back removes nothing if the first one loses bits: float32 -> bfloat16 -> float32 stays.
#include <unordered_map>
#include <utility>

#include "penstock/base/hash.h"
#include "penstock/graph/passes/replacement.h"
#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {
namespace {

constexpr std::string_view kCastOperator[] = {"aten::_to_copy"};

// Whether every number of one dtype is a number of the other. Both floating or both whole: what rounds from
// the wider one then rounds the same from the narrower one.
bool is_lossless(at::ScalarType from, at::ScalarType to) {
  switch (from) {
    case at::kHalf:
    case at::kBFloat16:
      return to == at::kFloat || to == at::kDouble;
    case at::kFloat:
      return to == at::kDouble;
    case at::kByte:
    case at::kChar:
      return to == at::kShort || to == at::kInt || to == at::kLong;
    case at::kShort:
      return to == at::kInt || to == at::kLong;
    case at::kInt:
      return to == at::kLong;
    default:
      return false;
  }
}

bool both_floating_or_both_whole(at::ScalarType a, at::ScalarType b) {
  return (c10::isFloatingType(a) && c10::isFloatingType(b)) ||
         (c10::isIntegralType(a, false) && c10::isIntegralType(b, false));
}

class CastRemover {
 public:
  CastRemover(Graph& graph, PassRole role)
      : graph_(graph),
        role_(role),
        memory_(graph),
        replaced_(graph),
        operators_(kCastOperator),
        casts_(graph.values.size()) {}

  void run() {
    std::vector<char> gone(graph_.nodes.size(), 0);
    bool any = false;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      replaced_.translate(node.arguments);
      if (operators_.of(node.op) != 0 || !is_plain_cast(node)) continue;
      const ValueId same = find_same(node), result = node.results[0].value();
      if (same != kNoValue) {
        replaced_.put(same, result);
        any = true;
        gone[i] = 1;
      } else {
        shorten(node);
        note(node);
      }
    }
    if (!any) return;
    replaced_.finish();
    erase_nodes(graph_, gone);
  }

 private:
  struct Cast {
    ValueId from = kNoValue;
    Phase phase = Phase::Forward;
  };

  // Of a strided tensor, on its own device, into ordinary memory.
  bool is_plain_cast(const Node& node) const {
    if (node.arguments[0].value() == kNoValue || node.results[0].value() == kNoValue) return false;
    const Operand &layout = node.arguments[2], &pinned = node.arguments[4];
    const Geometry &from = graph_[node.arguments[0].value()].geometry,
                   &to = graph_[node.results[0].value()].geometry;
    return from.device == to.device && !from.conjugated && !from.negated && !to.conjugated && !to.negated &&
           (layout.constant.isNone() || layout.constant.toInt() == static_cast<int>(at::kStrided)) &&
           (pinned.constant.isNone() || !pinned.constant.toBool());
  }

  // The tensor that has the bits and the geometry of the result, if the result may be replaced by it.
  ValueId find_same(const Node& node) const {
    const ValueId result = node.results[0].value(), source = node.arguments[0].value();
    const Geometry& geometry = graph_[result].geometry;
    if (!holds_for_all_sizes(graph_, geometry)) return kNoValue;
    const auto usable = [&](ValueId value) {
      return graph_[value].geometry == geometry && memory_.may_put(graph_, role_, value, result);
    };
    if (usable(source)) return source;
    const Cast& inner = casts_[index_of(source)];
    if (inner.from != kNoValue &&
        is_lossless(graph_[inner.from].geometry.dtype, graph_[source].geometry.dtype) && usable(inner.from))
      return inner.from;
    for (auto [entry, end] = made_.equal_range(key_of(source, geometry.dtype)); entry != end; ++entry) {
      const ValueId other = entry->second;
      const Cast& cast = casts_[index_of(other)];
      // Outputs stay tensors of their own.
      if (cast.from == source && cast.phase == node.phase && graph_[other].geometry == geometry &&
          !memory_.in_output(graph_, other) && !memory_.in_output(graph_, result))
        return other;
    }
    return kNoValue;
  }

  // One cast instead of two.
  void shorten(Node& node) const {
    const ValueId source = node.arguments[0].value();
    const Cast& inner = casts_[index_of(source)];
    if (inner.from == kNoValue || inner.phase != node.phase) return;
    const Geometry &first = graph_[inner.from].geometry, &middle = graph_[source].geometry,
                   &last = graph_[node.results[0].value()].geometry;
    const bool same_layout = first.symbolic == kNotSymbolic && first.strides == middle.strides;
    if (same_layout && is_lossless(first.dtype, middle.dtype) &&
        both_floating_or_both_whole(first.dtype, last.dtype))
      node.arguments[0].values[0] = inner.from;
  }

  void note(const Node& node) {
    const ValueId result = node.results[0].value(), source = node.arguments[0].value();
    casts_[index_of(result)] = {source, node.phase};
    made_.emplace(key_of(source, graph_[result].geometry.dtype), result);
  }

  static std::size_t key_of(ValueId source, at::ScalarType dtype) {
    return HashBuilder().add(static_cast<std::int32_t>(source)).add(static_cast<int>(dtype)).value();
  }

  Graph& graph_;
  PassRole role_;
  VisibleMemory memory_;
  Replacement replaced_;
  OperatorNumbers operators_;
  std::vector<Cast> casts_;  // by value
  std::unordered_multimap<std::size_t, ValueId> made_;
};

class CastRemoval final : public GraphPass {
 public:
  std::string_view name() const override { return "cast-removal"; }
  bool takes_symbols() const override { return true; }
  Graph run(Graph graph, const PassContext& context) const override {
    CastRemover(graph, context.role).run();
    return graph;
  }
};

}  // namespace

PassPointer cast_removal_pass() { return std::make_shared<const CastRemoval>(); }

}  // namespace penstock::graph
