#include "penstock/graph/tools/fold.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace penstock::graph {
namespace {

constexpr std::size_t kNobody = static_cast<std::size_t>(-1);
constexpr std::size_t kLongestStretch = 2048;
// Candidates whose nodes look equal but use each other's results differently.
constexpr std::size_t kTries = 64;

// The producer of a value: a node and the index among its results.
struct Maker {
  std::size_t node = kNobody, place = 0;
};

std::vector<Maker> makers_of(const Graph& graph) {
  std::vector<Maker> makers(graph.values.size());
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    std::size_t place = 0;
    for_each_value(graph.nodes[i].results, [&](ValueId value) { makers[index_of(value)] = {i, place++}; });
  }
  return makers;
}

// Everything about a node except where its arguments come from.
std::string node_key(const Graph& graph, const Node& node) {
  std::string text = fmt::format("{}{}{}", c10::toString(node.op.operator_name()),
                                 node.phase == Phase::Forward ? 'F' : 'B', node.grad_enabled ? '+' : '-');
  const auto add = [&](const std::vector<Operand>& operands) {
    for (const Operand& operand : operands) {
      text += ';';
      if (operand.kind == Operand::Kind::Constant) {
        text += to_text(operand, graph.table.get());
        continue;
      }
      for (const ValueId value : operand.values)
        text += value == kNoValue ? std::string("none,")
                                  : to_text(graph[value].geometry, graph.table.get()) + ",";
    }
  };
  add(node.arguments);
  text += "->";
  add(node.results);
  return text;
}

bool used_alike(const Graph& graph, const std::vector<Maker>& makers, std::size_t first, std::size_t second,
                std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) {
    std::vector<ValueId> one, other;
    for_each_value(graph.nodes[first + i].arguments, [&](ValueId value) { one.push_back(value); });
    for_each_value(graph.nodes[second + i].arguments, [&](ValueId value) { other.push_back(value); });
    if (one.size() != other.size()) return false;
    for (std::size_t a = 0; a < one.size(); ++a) {
      const Maker left = makers[index_of(one[a])], right = makers[index_of(other[a])];
      const bool inside = left.node != kNobody && left.node >= first && left.node < first + length;
      const bool other_inside = right.node != kNobody && right.node >= second && right.node < second + length;
      if (inside != other_inside ||
          (inside && (left.node - first != right.node - second || left.place != right.place)))
        return false;
    }
  }
  return true;
}

// Returns "blocks.0.attention.query" for "blocks.0.attention.query.weight", and an empty string for a name
// without dots.
std::string module_of(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? std::string() : parameter.substr(0, dot);
}

// Whether the node returns the same values in another order or dtype.
bool only_reorders(const Node& node) {
  static const std::set<std::string_view> kNames{"aten::t",
                                                 "aten::transpose",
                                                 "aten::permute",
                                                 "aten::view",
                                                 "aten::_reshape_alias",
                                                 "aten::reshape",
                                                 "aten::_unsafe_view",
                                                 "aten::expand",
                                                 "aten::detach",
                                                 "aten::alias",
                                                 "aten::_to_copy",
                                                 "aten::to"};
  return kNames.contains(node.op.operator_name().name);
}

std::string_view first_component(std::string_view path) { return path.substr(0, path.find('.')); }

class Folder {
 public:
  Folder(const Graph& graph, const FoldOptions& options)
      : graph_(graph), options_(options), makers_(makers_of(graph)) {
    std::unordered_map<std::string, std::size_t> numbers;
    for (const Node& node : graph.nodes)
      looks_.push_back(numbers.try_emplace(node_key(graph, node), numbers.size()).first->second);
    find_modules();
  }

  std::vector<Fold> fold() const {
    std::vector<Fold> parts = repeats(0, graph_.nodes.size());
    if (parts.size() <= options_.max_parts) return parts;
    parts = grouped(std::move(parts));
    // Forward and backward are drawn side by side: few parts of each.
    const auto border = std::find_if(parts.begin(), parts.end(),
                                     [](const Fold& part) { return part.phase == Phase::Backward; });
    std::vector<Fold> forward(std::make_move_iterator(parts.begin()), std::make_move_iterator(border)),
        backward(std::make_move_iterator(border), std::make_move_iterator(parts.end()));
    forward = merged(std::move(forward), options_.max_parts_per_phase);
    for (Fold& part : merged(std::move(backward), options_.max_parts_per_phase))
      forward.push_back(std::move(part));
    return limited(std::move(forward));
  }

 private:
  struct Candidate {
    // Nodes [begin, begin + equal) look like those `length` further on.
    std::size_t saved = 0, length = 0, begin = 0, equal = 0;
  };
  struct Repeat {
    std::size_t first = 0, length = 0, count = 1;
  };

  // The module whose parameters a node uses. Nodes without parameters belong, in forward, to the next module
  // (a norm multiplies by its weight at its end), in backward to the previous one.
  void find_modules() {
    std::vector<std::string> name(graph_.values.size());
    for (const Placeholder& input : graph_.inputs) name[index_of(input.value)] = module_of(input.name);
    // A weight that was only transposed or viewed is still that weight, also in backward.
    for (const Node& node : graph_.nodes) {
      if (!only_reorders(node)) continue;
      std::string module;
      for_each_value(node.arguments, [&](ValueId value) { module = name[index_of(value)]; });
      for_each_value(node.results, [&](ValueId value) { name[index_of(value)] = module; });
    }
    modules_.resize(graph_.nodes.size());
    const auto own = [&](std::size_t node) {
      std::string module;
      for_each_value(graph_.nodes[node].arguments, [&](ValueId value) {
        if (module.empty()) module = name[index_of(value)];
      });
      return module;
    };
    std::string last;
    for (std::size_t i = 0; i < modules_.size(); ++i) {
      if (graph_.nodes[i].phase == Phase::Forward) continue;
      if (std::string module = own(i); !module.empty()) last = std::move(module);
      modules_[i] = last;
    }
    last.clear();
    for (std::size_t i = modules_.size(); i-- > 0;) {
      if (graph_.nodes[i].phase == Phase::Backward) continue;
      if (std::string module = own(i); !module.empty()) last = std::move(module);
      modules_[i] = last;
    }
  }

  // ---- repeats ----

  std::vector<Candidate> candidates(std::size_t begin, std::size_t end) const {
    std::vector<Candidate> found;
    for (std::size_t length = 1; length <= std::min((end - begin) / 2, kLongestStretch); ++length) {
      std::size_t equal = 0;
      for (std::size_t i = begin; i + length <= end; ++i) {
        if (i + length < end && looks_[i] == looks_[i + length]) {
          ++equal;
          continue;
        }
        if (const std::size_t saved = equal / length * length; saved >= options_.min_nodes_saved)
          found.push_back({saved, length, i - equal, equal});
        equal = 0;
      }
    }
    // Largest saving first; among equal ones the shortest, which is not a multiple of another.
    std::stable_sort(found.begin(), found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.saved > b.saved; });
    return found;
  }

  // The number of results of one sequence that the next one uses: few at module boundaries.
  std::size_t passed_on(std::size_t first, std::size_t length) const {
    std::set<std::size_t> values;
    for (std::size_t i = first + length; i < first + 2 * length; ++i)
      for_each_value(graph_.nodes[i].arguments, [&](ValueId value) {
        if (const std::size_t from = makers_[index_of(value)].node;
            from != kNobody && from >= first && from < first + length)
          values.insert(index_of(value));
      });
    return values.size();
  }

  // The longest run of equal sequences in the candidate, starting where the fewest results are passed on.
  Repeat verified(const Candidate& candidate) const {
    const std::size_t most = candidate.equal / candidate.length + 1,
                      slack = candidate.equal % candidate.length;
    // Sorted by results passed on, then by nodes of other modules: few results are passed on at module
    // boundaries, and a sequence should be one module.
    std::vector<std::tuple<std::size_t, std::size_t, std::size_t>> starts;
    for (std::size_t shift = 0; shift <= slack; ++shift) {
      const std::size_t first = candidate.begin + shift;
      starts.emplace_back(passed_on(first, candidate.length),
                          nodes_of_other_modules(first, first + candidate.length), first);
    }
    std::stable_sort(starts.begin(), starts.end());
    Repeat best;
    for (std::size_t i = 0; i < std::min(starts.size(), kTries) && best.count < most; ++i) {
      std::size_t first = std::get<2>(starts[i]), count = 1;
      const auto take = [&] {
        if (count > best.count) best = {first, candidate.length, count};
      };
      for (std::size_t k = 1; k < most; ++k) {
        const std::size_t next = std::get<2>(starts[i]) + k * candidate.length;
        if (used_alike(graph_, makers_, first, next, candidate.length)) {
          ++count;
          continue;
        }
        take();  // the first or the last one may differ from the rest
        first = next;
        count = 1;
      }
      take();
    }
    return best;
  }

  std::vector<Fold> repeats(std::size_t begin, std::size_t end) const {
    std::size_t tries = 0;
    for (const Candidate& candidate : candidates(begin, end)) {
      if (++tries > kTries) break;
      const Repeat repeat = verified(candidate);
      if (repeat.count < 2 || (repeat.count - 1) * repeat.length < options_.min_nodes_saved) continue;
      std::vector<Fold> parts = repeats(begin, repeat.first);
      Fold fold{{}, graph_.nodes[repeat.first].phase, repeat.first, repeat.length, repeat.count, {}};
      if (repeat.length > 1) {
        fold.parts = limited(grouped(repeats(repeat.first, repeat.first + repeat.length)));
        fold.name = name_of(fold);
      } else {
        fold.name = c10::toString(graph_.nodes[repeat.first].op.operator_name());
      }
      parts.push_back(std::move(fold));
      for (Fold& part : repeats(repeat.first + repeat.length * repeat.count, end))
        parts.push_back(std::move(part));
      return parts;
    }
    std::vector<Fold> nodes;
    for (std::size_t i = begin; i < end; ++i)
      nodes.push_back(
          {c10::toString(graph_.nodes[i].op.operator_name()), graph_.nodes[i].phase, i, 1, 1, {}});
    return nodes;
  }

  // ---- groups ----

  // Parts of the same module become one. Modules are distinguished by the name component after their common
  // prefix.
  std::vector<Fold> grouped(std::vector<Fold> parts) const {
    if (parts.size() <= options_.max_parts) return parts;
    const std::size_t common = common_prefix(parts.front().first, parts.back().end());
    // Large repeats stay separate.
    std::size_t all = 0;
    for (const Fold& part : parts) all += part.nodes();
    const auto alone = [&](const Fold& part) {
      return !part.is_node() && part.count > 1 && 8 * part.nodes() >= all;
    };
    const auto label = [&](const Fold& part) {
      return std::string(first_component(
          std::string_view(modules_[part.first]).substr(std::min(common, modules_[part.first].size()))));
    };
    std::vector<Fold> groups;
    for (std::size_t i = 0; i < parts.size();) {
      std::size_t j = i + 1;
      while (!alone(parts[i]) && j < parts.size() && !alone(parts[j]) && parts[j].phase == parts[i].phase &&
             label(parts[j]) == label(parts[i]))
        ++j;
      if (j == i + 1 || j - i == parts.size()) {
        for (; i < j; ++i) groups.push_back(std::move(parts[i]));
      } else {
        groups.push_back(group(
            std::vector<Fold>(std::make_move_iterator(parts.begin() + static_cast<std::ptrdiff_t>(i)),
                              std::make_move_iterator(parts.begin() + static_cast<std::ptrdiff_t>(j)))));
        i = j;
      }
    }
    return groups;
  }

  Fold group(std::vector<Fold> parts) const {
    Fold fold{{}, parts.front().phase, parts.front().first, parts.back().end() - parts.front().first, 1, {}};
    // Uses the next component of the modules' names if it distinguishes parts.
    fold.parts = limited(grouped(std::move(parts)));
    fold.name = name_of(fold);
    return fold;
  }

  // At most max_parts, each of one phase.
  std::vector<Fold> limited(std::vector<Fold> parts) const {
    while (parts.size() > options_.max_parts) {
      const std::size_t each = (parts.size() + options_.max_parts - 1) / options_.max_parts;
      const std::size_t chunk = std::max<std::size_t>({each, 2, options_.max_parts / 2});
      std::vector<Fold> chunks;
      for (std::size_t i = 0; i < parts.size();) {
        std::size_t j = i;
        while (j < parts.size() && j - i < chunk && parts[j].phase == parts[i].phase) ++j;
        if (j == i + 1) {
          chunks.push_back(std::move(parts[i]));
        } else {
          Fold fold{{}, parts[i].phase, parts[i].first, parts[j - 1].end() - parts[i].first, 1, {}};
          fold.parts.assign(std::make_move_iterator(parts.begin() + static_cast<std::ptrdiff_t>(i)),
                            std::make_move_iterator(parts.begin() + static_cast<std::ptrdiff_t>(j)));
          fold.name = name_of(fold);
          chunks.push_back(std::move(fold));
        }
        i = j;
      }
      if (chunks.size() == parts.size()) return chunks;  // alternating phases: unchanged
      parts = std::move(chunks);
    }
    return parts;
  }

  // Merges neighbours, smallest first, until at most `most` remain; repeats stay separate as long as there
  // are others.
  std::vector<Fold> merged(std::vector<Fold> parts, std::size_t most) const {
    // Merged here: absorbs more parts instead of being merged into another.
    std::vector<char> made(parts.size(), 0);
    while (parts.size() > most) {
      const auto cost = [&](std::size_t i) {
        return std::tuple(parts[i].phase != parts[i + 1].phase, parts[i].count > 1 || parts[i + 1].count > 1,
                          parts[i].nodes() + parts[i + 1].nodes());
      };
      std::size_t best = 0;
      for (std::size_t i = 1; i + 1 < parts.size(); ++i)
        if (cost(i) < cost(best)) best = i;
      if (parts[best].phase != parts[best + 1].phase) break;
      Fold fold{{}, parts[best].phase, parts[best].first, parts[best + 1].end() - parts[best].first, 1, {}};
      for (const std::size_t i : {best, best + 1}) {
        if (made[i] != 0) {
          for (Fold& part : parts[i].parts) fold.parts.push_back(std::move(part));
        } else {
          fold.parts.push_back(std::move(parts[i]));
        }
      }
      fold.name = name_of(fold);
      parts[best] = std::move(fold);
      made[best] = 1;
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      made.erase(made.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (made[i] != 0) parts[i].parts = limited(std::move(parts[i].parts));
    return parts;
  }

  // The length of a prefix like "blocks.0." that all modules of the nodes share.
  std::size_t common_prefix(std::size_t begin, std::size_t end) const {
    std::string_view common;
    bool any = false;
    for (std::size_t i = begin; i < end; ++i) {
      if (modules_[i].empty()) continue;
      const std::string_view module = modules_[i];
      if (!any) {
        common = module;
        any = true;
        continue;
      }
      const auto [a, b] = std::mismatch(common.begin(), common.end(), module.begin(), module.end());
      const bool whole =
          (a == common.end() && (b == module.end() || *b == '.')) || (b == module.end() && *a == '.');
      common = common.substr(0, static_cast<std::size_t>(a - common.begin()));
      if (!whole)
        common = common.substr(0, common.rfind('.') == std::string_view::npos ? 0 : common.rfind('.'));
    }
    return common.empty() ? 0 : common.size() + 1;
  }

  // The longest path to which most of the nodes belong; a few at the ends may belong to neighbours.
  std::string module_name(std::size_t begin, std::size_t end) const {
    std::string name;
    std::size_t known = 0;
    for (std::size_t i = begin; i < end; ++i) known += !modules_[i].empty();
    while (known > 0) {
      std::map<std::string, std::size_t> times;
      for (std::size_t i = begin; i < end; ++i) {
        const std::string& module = modules_[i];
        if (module.size() > name.size() &&
            (name.empty() || (module.starts_with(name) && module[name.size()] == '.')))
          ++times[module.substr(0, module.find('.', name.empty() ? 0 : name.size() + 1))];
      }
      const auto most = std::max_element(times.begin(), times.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; });
      if (most == times.end() || 20 * most->second < 17 * known) break;
      name = most->first;
    }
    return name;
  }
  // The number of nodes outside the module given by the first two components of the most frequent path:
  // "blocks.1".
  std::size_t nodes_of_other_modules(std::size_t begin, std::size_t end) const {
    std::map<std::string, std::size_t> times;
    std::size_t most = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const std::string& module = modules_[i];
      const std::size_t dot = module.find('.');
      most = std::max(
          most, ++times[dot == std::string::npos ? module : module.substr(0, module.find('.', dot + 1))]);
    }
    return end - begin - most;
  }

  std::string name_of(const Fold& fold) const {
    const std::string module = module_name(fold.first, fold.first + fold.length);
    if (!module.empty()) {
      const std::string last = fold.count > 1 ? module_name(fold.end() - fold.length, fold.end()) : module;
      return last == module || last.empty() ? module : fmt::format("{} ... {}", module, last);
    }
    // The modules in it, otherwise its operators, most frequent first.
    std::vector<std::string> names;
    for (std::size_t i = fold.first; i < fold.first + fold.length; ++i) {
      const std::string name(first_component(modules_[i]));
      if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
    if (names.empty()) {
      std::map<std::string, std::size_t> times;
      for (std::size_t i = fold.first; i < fold.first + fold.length; ++i)
        times[graph_.nodes[i].op.operator_name().name] += only_reorders(graph_.nodes[i]) ? 0 : 1;
      for (const auto& [name, count] : times) names.push_back(name);
      std::stable_sort(names.begin(), names.end(),
                       [&](const std::string& a, const std::string& b) { return times[a] > times[b]; });
      for (std::string& name : names)
        name = name.substr(name.find("::") == std::string::npos ? 0 : name.find("::") + 2);
    }
    const std::size_t shown = std::min<std::size_t>(names.size(), 3);
    std::string text;
    for (std::size_t i = 0; i < shown; ++i) text += (text.empty() ? "" : ", ") + names[i];
    return text + (names.size() > shown ? ", ..." : "");
  }

  const Graph& graph_;
  FoldOptions options_;
  std::vector<Maker> makers_;
  std::vector<std::size_t> looks_;
  std::vector<std::string> modules_;  // of each node; empty if unknown
};

}  // namespace

std::vector<Fold> fold_graph(const Graph& graph, const FoldOptions& options) {
  return Folder(graph, options).fold();
}

bool equal_sequences(const Graph& graph, std::size_t first, std::size_t second, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i)
    if (node_key(graph, graph.nodes[first + i]) != node_key(graph, graph.nodes[second + i])) return false;
  return used_alike(graph, makers_of(graph), first, second, length);
}

}  // namespace penstock::graph
