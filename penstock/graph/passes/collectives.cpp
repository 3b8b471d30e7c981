// "collectives": moves starts of collectives up and waits for them down, so that what neither needs the
// result nor makes the input is computed while the transfer is under way.
//
//   %2 = mm(%0, %1)                                  %2 = mm(%0, %1)
//   %3 = penstock::all_reduce(%2, "sum", "tp")       %3 = penstock::all_reduce(%2, "sum", "tp")
//   %4 = penstock::wait_tensor(%3)             ->    %5 = mm(%0, %9)
//   %5 = mm(%0, %9)                                  %4 = penstock::wait_tensor(%3)
//   %6 = add(%4, %5)                                 %6 = add(%4, %5)
//
// A wait moves down to the first use of its result, or to the end of the graph if that is an output; a start
// moves up to behind the last of what it needs. Neither moves past another start or wait, or past another
// operator with a side effect: all members of a group must start their collectives in the same order, and a
// wait may exchange parts of a sum that was started, so that ranks whose graphs differ in what they compute
// would otherwise wait for each other. Waits whose result nobody uses stay, because they release what the
// collective holds.
//
// Small collectives are not joined into larger ones: a sum over ranks has other bits at another place of a
// buffer, and ranks whose graphs differ could disagree about what to join.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "penstock/graph/passes/replacement.h"
#include "penstock/graph/passes/standard_passes.h"

namespace penstock::graph {
namespace {

constexpr std::string_view kCollectiveOperators[] = {
    "penstock::wait_tensor",           "penstock::all_reduce",         "penstock::all_gather_into_tensor",
    "penstock::reduce_scatter_tensor", "penstock::all_to_all_single",  "penstock::broadcast",
    "penstock::all_gather_flat",       "penstock::reduce_scatter_flat"};

class CollectiveMover {
 public:
  explicit CollectiveMover(Graph& graph) : graph_(graph), operators_(kCollectiveOperators) {}

  void run() {
    const bool any = std::any_of(graph_.nodes.begin(), graph_.nodes.end(),
                                 [&](const Node& node) { return kind_of(node) == Kind::Start; });
    if (!any) return;
    move_waits();
    move_starts();
  }

 private:
  enum class Kind : std::uint8_t { Compute, Start, Wait, OtherEffect };
  Kind kind_of(const Node& node) const {
    const int number = operators_.of(node.op);
    if (number == 0) return Kind::Wait;
    if (number > 0) return Kind::Start;
    return has_side_effect(node) ? Kind::OtherEffect : Kind::Compute;
  }

  // Waits to before the first node that uses the result, or the next operator with a side effect. A tensor
  // that is waited for may also be used as what the start has returned: whatever is in its memory counts.
  void move_waits() {
    const std::size_t count = graph_.nodes.size(), never = std::numeric_limits<std::size_t>::max();
    std::vector<std::size_t> next_use(static_cast<std::size_t>(graph_.storages), never);
    for_each_value(graph_.outputs, [&](ValueId value) { next_use[index_of(graph_[value].storage)] = count; });
    // By place: what moves to before the node there, last one first. The last place is the end of the graph.
    std::vector<std::vector<std::size_t>> before(count + 1);
    std::vector<char> moves(count, 0);
    std::size_t next = count;  // the new place of the next operator with a side effect
    for (std::size_t i = count; i-- > 0;) {
      const Node& node = graph_.nodes[i];
      const Kind kind = kind_of(node);
      std::size_t place = i;
      if (kind == Kind::Wait) {
        const std::size_t use = next_use[index_of(graph_[node.arguments[0].value()].storage)];
        if (const std::size_t latest = std::min(use, next); use != never && latest > i + 1) {
          place = latest;
          before[place].push_back(i);
          moves[i] = 1;
        }
      }
      if (kind != Kind::Compute) next = place;
      for_each_value(node.arguments,
                     [&](ValueId value) { next_use[index_of(graph_[value].storage)] = place; });
    }
    std::vector<Node> nodes;
    nodes.reserve(count);
    for (std::size_t i = 0; i <= count; ++i) {
      for (auto wait = before[i].rbegin(); wait != before[i].rend(); ++wait)
        nodes.push_back(std::move(graph_.nodes[*wait]));
      if (i < count && !moves[i]) nodes.push_back(std::move(graph_.nodes[i]));
    }
    graph_.nodes = std::move(nodes);
  }

  // Starts to behind the last node that makes an argument, and the last operator with a side effect.
  void move_starts() {
    const std::size_t count = graph_.nodes.size();
    // Places are counted from 1; 0 is the beginning of the graph.
    std::vector<std::size_t> made_at(graph_.values.size(), 0);
    std::vector<std::vector<std::size_t>> behind(count + 1);
    std::vector<char> moves(count, 0);
    std::size_t last = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Node& node = graph_.nodes[i];
      const Kind kind = kind_of(node);
      std::size_t place = i + 1;
      if (kind == Kind::Start) {
        place = last;
        for_each_value(node.arguments,
                       [&](ValueId value) { place = std::max(place, made_at[index_of(value)]); });
        if (place < i) {
          behind[place].push_back(i);
          moves[i] = 1;
        } else {
          place = i + 1;
        }
      }
      if (kind != Kind::Compute) last = place;
      for_each_value(node.results, [&](ValueId value) { made_at[index_of(value)] = place; });
    }
    std::vector<Node> nodes;
    nodes.reserve(count);
    for (std::size_t i = 0; i <= count; ++i) {
      if (i > 0 && !moves[i - 1]) nodes.push_back(std::move(graph_.nodes[i - 1]));
      for (const std::size_t start : behind[i]) nodes.push_back(std::move(graph_.nodes[start]));
    }
    graph_.nodes = std::move(nodes);
  }

  Graph& graph_;
  OperatorNumbers operators_;
};

class Collectives final : public GraphPass {
 public:
  std::string_view name() const override { return "collectives"; }
  bool runs_on(PassRole role) const override { return role != PassRole::Joint; }
  bool takes_symbols() const override { return true; }
  Graph run(Graph graph, const PassContext&) const override {
    CollectiveMover(graph).run();
    return graph;
  }
};

}  // namespace

PassPointer collectives_pass() { return std::make_shared<const Collectives>(); }

}  // namespace penstock::graph
