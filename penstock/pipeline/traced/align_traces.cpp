#include "penstock/pipeline/traced/align_traces.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

namespace penstock {
namespace {

using graph::ForwardTrace;
using graph::ValueId;

// Numbers for texts, the same for both traces.
class Numbering {
 public:
  int of(std::string text) {
    return numbers_.try_emplace(std::move(text), static_cast<int>(numbers_.size())).first->second;
  }

 private:
  std::unordered_map<std::string, int> numbers_;
};

struct NodeKey {
  int what;  // operator, module, and the parameters and buffers that it takes
  int from;  // the operators that made its other arguments
  bool operator==(const NodeKey&) const = default;
};

std::vector<NodeKey> keys_of(const ForwardTrace& trace, Numbering& numbers) {
  const graph::Graph& graph = trace.graph;
  std::vector<std::string> origin(graph.values.size(), "?");
  std::vector<char> is_state(graph.values.size(), 0);
  for (std::size_t i = 0; i < graph.inputs.size(); ++i) {
    origin[graph::index_of(graph.inputs[i].value)] = graph.inputs[i].name;
    is_state[graph::index_of(graph.inputs[i].value)] = i < trace.found ? 1 : 0;
  }
  std::vector<NodeKey> keys;
  keys.reserve(graph.nodes.size());
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const graph::Node& node = graph.nodes[i];
    const std::string name = c10::toString(node.op.operator_name());
    std::string what = name + "|" + trace.module_of_node[i], from;
    graph::for_each_value(node.arguments, [&](ValueId value) {
      (is_state[graph::index_of(value)] ? what : from) += "|" + origin[graph::index_of(value)];
    });
    keys.push_back({numbers.of(std::move(what)), numbers.of(std::move(from))});
    // What is written keeps its first maker.
    graph::for_each_value(node.results, [&](ValueId value) {
      std::string& made_by = origin[graph::index_of(value)];
      if (made_by == "?") made_by = name;
    });
  }
  return keys;
}

// Hirschberg's algorithm: two rows of memory instead of the whole table.
class Alignment {
 public:
  Alignment(const std::vector<NodeKey>& a, const std::vector<NodeKey>& b)
      : a_(a), b_(b), other_(a.size(), kNotAligned) {}

  std::vector<std::size_t> run() {
    align(0, a_.size(), 0, b_.size());
    return std::move(other_);
  }

 private:
  using Score = std::int64_t;
  // More than all preferences of a trace together.
  static constexpr Score kAligned = Score{1} << 32;

  Score score(std::size_t i, std::size_t j) const {
    if (a_[i].what != b_[j].what) return 0;
    return kAligned + (a_[i].from == b_[j].from ? 1 : 0);
  }

  void align(std::size_t a, std::size_t a_end, std::size_t b, std::size_t b_end) {
    // What is equal at the beginning or end is aligned in some best solution.
    while (a < a_end && b < b_end && a_[a] == b_[b]) other_[a++] = b++;
    while (a < a_end && b < b_end && a_[a_end - 1] == b_[b_end - 1]) other_[--a_end] = --b_end;
    if (a == a_end || b == b_end) return;
    if (a_end - a == 1) {
      std::size_t best = b_end;
      for (std::size_t j = b; j < b_end; ++j)
        if (score(a, j) > (best == b_end ? 0 : score(a, best))) best = j;
      if (best != b_end) other_[a] = best;
      return;
    }
    const std::size_t middle = a + (a_end - a) / 2;
    const std::vector<Score> before = best_of_beginnings(a, middle, b, b_end),
                             after = best_of_ends(middle, a_end, b, b_end);
    std::size_t best = 0;
    for (std::size_t j = 1; j < before.size(); ++j)
      if (before[j] + after[j] > before[best] + after[best]) best = j;
    align(a, middle, b, b + best);
    align(middle, a_end, b + best, b_end);
  }

  // By number of nodes of b.
  std::vector<Score> best_of_beginnings(std::size_t a, std::size_t a_end, std::size_t b,
                                        std::size_t b_end) const {
    std::vector<Score> row(b_end - b + 1, 0);
    for (std::size_t i = a; i < a_end; ++i) {
      Score diagonal = 0;
      for (std::size_t j = 1; j < row.size(); ++j) {
        const Score both = diagonal + score(i, b + j - 1);
        diagonal = row[j];
        row[j] = std::max({row[j], row[j - 1], both});
      }
    }
    return row;
  }
  // By number of nodes of b that are left out at its beginning.
  std::vector<Score> best_of_ends(std::size_t a, std::size_t a_end, std::size_t b, std::size_t b_end) const {
    std::vector<Score> row(b_end - b + 1, 0);
    for (std::size_t i = a_end; i-- > a;) {
      Score diagonal = 0;
      for (std::size_t j = row.size() - 1; j-- > 0;) {
        const Score both = diagonal + score(i, b + j);
        diagonal = row[j];
        row[j] = std::max({row[j], row[j + 1], both});
      }
    }
    return row;
  }

  const std::vector<NodeKey>&a_, &b_;
  std::vector<std::size_t> other_;
};

}  // namespace

std::vector<std::size_t> aligned_nodes(const ForwardTrace& trace, const ForwardTrace& other) {
  Numbering numbers;
  const std::vector<NodeKey> a = keys_of(trace, numbers), b = keys_of(other, numbers);
  return Alignment(a, b).run();
}

}  // namespace penstock
