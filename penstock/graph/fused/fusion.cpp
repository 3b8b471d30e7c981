#include "penstock/graph/fused/fusion.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kNoGroup = static_cast<std::size_t>(-1);
constexpr std::size_t kMostNodes = 96;    // of a group
constexpr std::size_t kMostBuffers = 32;  // of a kernel
constexpr std::size_t kMostRepeated = 6;  // nodes that a sum computes again
constexpr std::int64_t kLine = 64;        // bytes that memory moves at once
constexpr std::int64_t kFewElements = 16384;
constexpr std::int64_t kManyInOneRow = 262144;  // without other rows for other threads
// The same on a GPU, where a row is what a block of threads computes, and fewer rows leave most of it idle.
constexpr std::int64_t kManyInARowOfAGpu = 16384, kFewRowsOfAGpu = 64;

using Nodes = std::vector<std::size_t>;

class GroupChoice {
 public:
  GroupChoice(const Graph& graph, const FusionOptions& options)
      : graph_(graph),
        options_(options),
        users_(graph.values.size()),
        is_output_(graph.values.size(), 0),
        maker_(graph.values.size(), kNoGroup),
        after_(graph.nodes.size()),
        group_of_(graph.nodes.size(), kNoGroup),
        period_(graph.nodes.size(), 0) {
    std::size_t last_ordered = kNoGroup, period = 0;
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      const Node& node = graph.nodes[i];
      for_each_value(node.arguments, [&](ValueId value) {
        users_[index_of(value)].push_back(i);
        if (const std::size_t maker = maker_[index_of(value)]; maker != kNoGroup) after_[maker].push_back(i);
      });
      for_each_value(node.results, [&](ValueId value) { maker_[index_of(value)] = i; });
      kinds_.push_back(kind_of(graph, node, options.lowering));
      if (must_run(node)) {
        if (last_ordered != kNoGroup) after_[last_ordered].push_back(i);
        last_ordered = i;
      }
      // What was written is another value than before, under the same name.
      if (writes(node)) ++period;
      period_[i] = period;
      if (writes(node)) ++period;
    }
    for_each_value(graph.outputs, [&](ValueId value) { is_output_[index_of(value)] = 1; });
  }

  FusionPlan run() {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) place(i);
    join_readers();
    repeat_cheap_arguments();
    FusionPlan plan;
    for (std::size_t g = 0; g < groups_.size(); ++g) finish(g, plan);
    return plan;
  }

 private:
  struct Group {
    Nodes nodes;     // in order; empty: joined to another one
    Nodes repeated;  // computed here, too
    std::optional<GroupLoops> loops;
  };

  // The values of a set of nodes that others use. A view that others use is made outside, of its base.
  std::vector<ValueId> needed_of(const Nodes& nodes) const {
    const std::set<std::size_t> inside(nodes.begin(), nodes.end());
    std::set<std::size_t> views_needed;
    std::vector<ValueId> needed;
    const auto is_needed = [&](ValueId value) {
      if (is_output_[index_of(value)] || used_again_.contains(value)) return true;
      return std::any_of(
          users_[index_of(value)].begin(), users_[index_of(value)].end(),
          [&](std::size_t user) { return !inside.contains(user) || views_needed.contains(user); });
    };
    for (std::size_t i = nodes.size(); i-- > 0;) {
      bool any = false;
      for_each_value(graph_.nodes[nodes[i]].results, [&](ValueId value) {
        if (!is_needed(value)) return;
        any = true;
        if (kinds_[nodes[i]] == NodeKind::Compute) needed.push_back(value);
      });
      if (any && kinds_[nodes[i]] == NodeKind::View) views_needed.insert(nodes[i]);
    }
    std::reverse(needed.begin(), needed.end());
    return needed;
  }

  // Whether the nodes can run at one time: nothing outside lies on a path between two of them.
  bool can_run_together(const Nodes& nodes) const {
    for (const std::size_t node : nodes)
      if (period_[node] != period_[nodes[0]]) return false;
    if (nodes.size() == 1) return true;
    const std::set<std::size_t> inside(nodes.begin(), nodes.end());
    std::vector<char> seen(graph_.nodes.size(), 0);
    std::vector<std::size_t> open;
    // A node that runs together with others comes before whatever any of them comes before.
    const auto visit = [&](std::size_t node) {
      const auto add = [&](std::size_t each) {
        if (!seen[each]) seen[each] = 1, open.push_back(each);
      };
      if (group_of_[node] == kNoGroup) return add(node);
      const Nodes& together = groups_[group_of_[node]].nodes;
      if (inside.contains(together[0])) return add(node);
      for (const std::size_t each : together) add(each);
    };
    for (const std::size_t node : nodes)
      for (const std::size_t next : after_[node])
        if (!inside.contains(next)) visit(next);
    while (!open.empty()) {
      const std::size_t node = open.back();
      open.pop_back();
      if (inside.contains(node)) return false;
      for (const std::size_t next : after_[node]) {
        if (inside.contains(next)) return false;
        visit(next);
      }
    }
    return true;
  }

  std::optional<GroupLoops> loops_for(const Nodes& nodes) const {
    if (nodes.size() > kMostNodes) return std::nullopt;
    auto loops = loops_of(graph_, nodes, needed_of(nodes), options_.lowering);
    if (loops && loops->kernel.buffers.size() > kMostBuffers) return std::nullopt;
    return loops;
  }

  Nodes merged(const Nodes& a, const Nodes& b) const {
    Nodes both;
    std::merge(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
    return both;
  }

  bool join(std::size_t into, const Nodes& more, std::size_t from = kNoGroup) {
    const Nodes nodes = merged(groups_[into].nodes, more);
    auto loops = loops_for(nodes);
    if (!loops || !can_run_together(nodes)) return false;
    groups_[into].nodes = nodes;
    groups_[into].loops = std::move(loops);
    for (const std::size_t node : more) group_of_[node] = into;
    if (from != kNoGroup) groups_[from] = {};
    return true;
  }

  // Adds a node to the groups that compute its arguments, or makes one of its own.
  void place(std::size_t node) {
    if (kinds_[node] == NodeKind::Unknown) return;
    std::vector<std::size_t> of_arguments;
    for_each_value(graph_.nodes[node].arguments, [&](ValueId value) {
      const std::size_t maker = maker_[index_of(value)];
      if (maker == kNoGroup || group_of_[maker] == kNoGroup) return;
      const std::size_t group = group_of_[maker];
      if (std::find(of_arguments.begin(), of_arguments.end(), group) == of_arguments.end())
        of_arguments.push_back(group);
    });
    // Later groups first: they are nearer.
    std::sort(of_arguments.rbegin(), of_arguments.rend());
    std::size_t joined = kNoGroup;
    for (const std::size_t group : of_arguments) {
      if (joined == kNoGroup) {
        if (join(group, {node})) joined = group;
      } else {
        join(joined, Nodes(groups_[group].nodes), group);
      }
    }
    if (joined != kNoGroup || kinds_[node] == NodeKind::View) return;
    auto loops = loops_for({node});
    if (!loops) return;
    group_of_[node] = groups_.size();
    groups_.push_back({{node}, {}, std::move(loops)});
  }

  // Joins groups that read the same large tensor.
  void join_readers() {
    std::map<ValueId, std::vector<std::size_t>> readers;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].nodes.empty()) continue;
      std::set<std::size_t> tried;
      const std::vector<GroupTensor> inputs = groups_[g].loops->inputs;
      for (const GroupTensor& input : inputs) {
        if (graph_[input.value].geometry.numel() * 2 < groups_[g].loops->kernel.elements()) continue;
        std::vector<std::size_t>& others = readers[input.value];
        for (std::size_t i = others.size(), tries = 0; i-- > 0 && tries < 4; ++tries) {
          const std::size_t other = others[i];
          if (groups_[other].nodes.empty() || other == g || !tried.insert(other).second) continue;
          if (groups_[other].loops->kernel.form != groups_[g].loops->kernel.form) continue;
          const Nodes nodes = groups_[other].nodes;
          // Loops with large steps would take the other ones with them.
          if (is_worthwhile(groups_[g]) || is_worthwhile(groups_[other])) {
            Group both{merged(groups_[g].nodes, nodes), {}, {}};
            both.loops = loops_for(both.nodes);
            if (!both.loops || !is_worthwhile(both)) continue;
          }
          join(g, nodes, other);
        }
        others.push_back(g);
      }
    }
  }

  // Sums over leading dims whose arguments another kernel has in passing.
  void repeat_cheap_arguments() {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      if (group.nodes.empty() || group.loops->kernel.form != LoopForm::Columns) continue;
      // A sum by itself; behind it there may be views of it.
      if (std::count_if(group.nodes.begin(), group.nodes.end(),
                        [&](std::size_t node) { return kinds_[node] == NodeKind::Compute; }) != 1)
        continue;
      Nodes nodes = group.nodes;
      for (std::size_t repeated = 0; repeated < kMostRepeated;) {
        // The latest node that makes an input, if it is cheap and the input is stored for this sum alone.
        std::size_t next = kNoGroup;
        const auto loops = loops_of(graph_, nodes, needed_of(group.nodes), options_.lowering);
        if (!loops) break;
        for (const GroupTensor& input : loops->inputs) {
          const std::size_t maker = maker_[index_of(input.value)];
          if (maker == kNoGroup || group_of_[maker] == kNoGroup || group_of_[maker] == g) continue;
          if (period_[maker] != period_[group.nodes[0]]) continue;
          if (graph_[input.value].geometry.numel() * 2 < loops->kernel.elements()) continue;
          const Nodes& users = users_[index_of(input.value)];
          const bool only_here = std::all_of(users.begin(), users.end(), [&](std::size_t user) {
            return group_of_[user] == group_of_[maker] ||
                   std::binary_search(nodes.begin(), nodes.end(), user);
          });
          if (!only_here || is_output_[index_of(input.value)] || !is_cheap(maker)) continue;
          if (next == kNoGroup || maker > next) next = maker;
        }
        if (next == kNoGroup) break;
        Nodes with = merged(nodes, {next});
        if (!loops_of(graph_, with, needed_of(group.nodes), options_.lowering)) break;
        nodes = std::move(with);
        ++repeated;
      }
      if (nodes.size() == group.nodes.size()) continue;
      auto loops = loops_of(graph_, nodes, needed_of(group.nodes), options_.lowering);
      // Afterwards nothing else makes what it computes again: it must not be left to its operators.
      Group with_repeated{group.nodes, {}, loops};
      for (const std::size_t node : nodes)
        if (group_of_[node] != g) with_repeated.repeated.push_back(node);
      if (!is_worthwhile(with_repeated)) continue;
      // What it reads now must be stored; what it read may not be needed any more.
      std::set<std::size_t> changed;
      const auto used_before = used_again_;
      std::vector<std::pair<ValueId, std::size_t>> left_out;
      for (const std::size_t node : nodes) changed.insert(group_of_[node]);
      for (const GroupTensor& input : loops->inputs) {
        used_again_.insert(input.value);
        if (const std::size_t maker = maker_[index_of(input.value)];
            maker != kNoGroup && group_of_[maker] != kNoGroup)
          changed.insert(group_of_[maker]);
      }
      // The sum itself no longer reads what it computes again.
      const std::size_t sum = group.nodes[0];
      for_each_value(graph_.nodes[sum].arguments, [&](ValueId value) {
        const std::size_t maker = maker_[index_of(value)];
        if (maker == kNoGroup || !std::binary_search(nodes.begin(), nodes.end(), maker)) return;
        auto& users = users_[index_of(value)];
        users.erase(std::remove(users.begin(), users.end(), sum), users.end());
        left_out.emplace_back(value, sum);
      });
      std::map<std::size_t, GroupLoops> again;
      bool works = true;
      for (const std::size_t other : changed) {
        if (other == g) continue;
        auto remade =
            loops_of(graph_, all_nodes(groups_[other]), needed_of(groups_[other].nodes), options_.lowering);
        if (!remade) works = false;
        if (remade) again.emplace(other, std::move(*remade));
      }
      if (!works) {
        used_again_ = used_before;
        for (const auto& [value, user] : left_out) users_[index_of(value)].push_back(user);
        continue;
      }
      for (auto& [other, loops_of_other] : again) groups_[other].loops = std::move(loops_of_other);
      group = std::move(with_repeated);
    }
  }

  static Nodes all_nodes(const Group& group) {
    Nodes all;
    std::merge(group.nodes.begin(), group.nodes.end(), group.repeated.begin(), group.repeated.end(),
               std::back_inserter(all));
    return all;
  }

  bool is_cheap(std::size_t node) const {
    if (kinds_[node] != NodeKind::Compute) return false;
    std::vector<ValueId> results;
    for_each_value(graph_.nodes[node].results, [&](ValueId value) { results.push_back(value); });
    const auto loops = loops_of(graph_, {node}, results, options_.lowering);
    return loops && loops->kernel.form == LoopForm::Elements && loops->kernel.cost_per_element() <= 8;
  }

  c10::Device device_of(const Group& group) const {
    return graph_[group.loops->outputs.at(0).value].geometry.device;
  }

  // Whether a kernel is worth its call.
  bool is_worthwhile(const Group& group) const {
    if (options_.everything) return true;
    const Nodes all = all_nodes(group);
    const auto computing = std::count_if(all.begin(), all.end(),
                                         [&](std::size_t node) { return kinds_[node] == NodeKind::Compute; });
    if (computing < 2) return false;
    const LoopKernel& kernel = group.loops->kernel;
    if (kernel.form == LoopForm::Rows) {
      const std::int64_t rows = kernel.range();
      const bool on_gpu = device_of(group).is_cuda();
      if (on_gpu ? rows < kFewRowsOfAGpu && kernel.elements() > kManyInARowOfAGpu * rows
                 : rows < 2 && kernel.elements() > kManyInOneRow)
        return false;
    }
    if (kernel.elements() <= kFewElements) return true;
    return std::none_of(kernel.buffers.begin(), kernel.buffers.end(), [&](const LoopBuffer& buffer) {
      std::int64_t items = 1;
      for (std::size_t d = 0; d < kernel.sizes.size(); ++d)
        if (buffer.strides[d] != 0) items *= kernel.sizes[d];
      const std::int64_t step =
          std::abs(buffer.strides.back()) * static_cast<std::int64_t>(bytes_of(buffer.type));
      return kernel.sizes.back() > 1 && step >= kLine && 2 * items >= kernel.elements();
    });
  }

  void finish(std::size_t g, FusionPlan& plan) {
    const Group& group = groups_[g];
    if (group.nodes.empty() || !is_worthwhile(group)) return;
    FusedGroup made{.nodes = all_nodes(group), .owned = group.nodes};
    made.kernel = group.loops->kernel;
    made.device = device_of(group);
    for (const GroupTensor& input : group.loops->inputs) made.inputs.push_back(input.value);
    for (const GroupTensor& output : group.loops->outputs) made.outputs.push_back(output.value);
    std::map<std::string, std::size_t> counts;
    std::vector<std::string> order;
    for (const std::size_t node : made.nodes) {
      if (kinds_[node] == NodeKind::View) continue;
      const std::string& name = graph_.nodes[node].op.operator_name().name;
      if (counts[name]++ == 0) order.push_back(name);
    }
    for (const std::string& name : order) {
      made.operators += (made.operators.empty() ? "" : ", ") + name;
      if (counts[name] > 1) made.operators += " x" + std::to_string(counts[name]);
    }
    plan.groups.push_back(std::move(made));
  }

  const Graph& graph_;
  const FusionOptions& options_;
  std::vector<Nodes> users_;     // by value: nodes that use it
  std::vector<char> is_output_;  // by value
  Nodes maker_;                  // by value
  std::vector<Nodes> after_;     // by node: nodes that must come later
  std::vector<NodeKind> kinds_;  // by node
  Nodes group_of_;               // by node
  Nodes period_;                 // by node: between which writes
  std::vector<Group> groups_;
  std::set<ValueId> used_again_;  // by groups that compute some nodes again
};

}  // namespace

FusionPlan plan_fusion(const Graph& graph, const FusionOptions& options) {
  if (graph.table) return {};  // sizes are not known
  return GroupChoice(graph, options).run();
}

Graph with_groups(const Graph& graph, const FusionPlan& plan,
                  const std::function<Node(std::size_t, Operand, Operand)>& call) {
  // Units: a group, or a node. Views of a group are units of their own.
  std::vector<std::size_t> unit_of(graph.nodes.size());
  std::vector<std::size_t> group_of(graph.nodes.size(), kNoGroup);
  for (std::size_t i = 0; i < unit_of.size(); ++i) unit_of[i] = i;
  std::vector<std::size_t> last(graph.nodes.size());
  for (std::size_t i = 0; i < last.size(); ++i) last[i] = i;
  const auto is_view = [&](std::size_t node) {
    return kind_of(graph, graph.nodes[node], {}) == NodeKind::View;
  };
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    std::size_t unit = kNoGroup;
    for (const std::size_t node : plan.groups[g].owned) {
      if (is_view(node)) continue;
      if (unit == kNoGroup) unit = node;
      unit_of[node] = unit;
      group_of[node] = g;
      last[unit] = node;
    }
  }
  std::vector<std::size_t> maker(graph.values.size(), kNoGroup);  // the unit
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (group_of[i] != kNoGroup) continue;
    for_each_value(graph.nodes[i].results, [&](ValueId value) { maker[index_of(value)] = i; });
  }
  for (const FusedGroup& group : plan.groups)
    for (const ValueId value : group.outputs)
      for (const std::size_t node : group.owned)
        for_each_value(graph.nodes[node].results, [&](ValueId made) {
          if (made == value) maker[index_of(value)] = unit_of[node];
        });
  std::vector<std::set<std::size_t>> after(graph.nodes.size());
  std::vector<std::size_t> waits_for(graph.nodes.size(), 0);
  const auto depend = [&](std::size_t unit, std::size_t on) {
    if (on != kNoGroup && on != unit && after[on].insert(unit).second) ++waits_for[unit];
  };
  std::size_t last_ordered = kNoGroup, last_write = kNoGroup;
  std::vector<std::size_t> since_write;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (group_of[i] == kNoGroup)
      for_each_value(node.arguments, [&](ValueId value) { depend(i, maker[index_of(value)]); });
    else if (unit_of[i] == i)
      for (const ValueId value : plan.groups[group_of[i]].inputs) depend(i, maker[index_of(value)]);
    if (must_run(node)) depend(i, std::exchange(last_ordered, i));
    depend(unit_of[i], last_write);
    if (writes(node)) {
      for (const std::size_t unit : since_write) depend(i, unit);
      since_write.clear();
      last_write = i;
    } else {
      since_write.push_back(unit_of[i]);
    }
  }
  Graph made = graph;
  made.nodes.clear();
  using Entry = std::pair<std::size_t, std::size_t>;  // when the unit is due, the unit
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
  std::size_t units = 0;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    if (unit_of[i] == i) {
      ++units;
      if (waits_for[i] == 0) ready.emplace(last[i], i);
    }
  while (!ready.empty()) {
    const std::size_t unit = ready.top().second;
    ready.pop();
    --units;
    if (const std::size_t g = group_of[unit]; g == kNoGroup) {
      made.nodes.push_back(graph.nodes[unit]);
    } else {
      Operand inputs{Operand::Kind::TensorList, {}, {}, kNotSymbolic}, outputs = inputs;
      inputs.values.append(plan.groups[g].inputs.begin(), plan.groups[g].inputs.end());
      outputs.values.append(plan.groups[g].outputs.begin(), plan.groups[g].outputs.end());
      Node node = call(g, std::move(inputs), std::move(outputs));
      node.phase = graph.nodes[plan.groups[g].owned.back()].phase;
      made.nodes.push_back(std::move(node));
    }
    for (const std::size_t next : after[unit])
      if (--waits_for[next] == 0) ready.emplace(last[next], next);
  }
  PENSTOCK_INVARIANT(units == 0, "fused groups depend on each other");
  remove_dead_nodes(made);
  verify(made);
  return made;
}

Graph graph_of_group(const Graph& graph, const FusedGroup& group) {
  Graph part;
  part.values = graph.values;
  part.storages = graph.storages;
  for (std::size_t i = 0; i < group.inputs.size(); ++i)
    part.inputs.push_back({group.inputs[i], "input" + std::to_string(i)});
  for (const std::size_t node : group.nodes) part.nodes.push_back(graph.nodes[node]);
  for (const ValueId value : group.outputs) part.outputs.push_back(Operand::of(value));
  remove_dead_nodes(part);
  verify(part);
  return part;
}

}  // namespace penstock::graph
