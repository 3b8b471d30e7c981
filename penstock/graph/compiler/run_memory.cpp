#include "penstock/graph/compiler/run_memory.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "penstock/graph/compiler/execute.h"
#include "penstock/graph/compiler/planner.h"
#include "penstock/graph/compiler/run_plan.h"
#include "penstock/graph/ir/memory_groups.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

class MemoryOfRun {
 public:
  MemoryOfRun(const Graph& graph, const RunMemoryOptions& options)
      : graph_(graph),
        groups_(graph, same_memory(graph, options)),
        last_uses_(graph),
        place_(groups_.count(), kNowhere),
        values_alive_(groups_.count(), 0),
        held_outside_(groups_.count(), 0) {
    const ExecutorOptions executor{.donated_inputs = options.donated_inputs};
    Executor::Counts counts;
    plan_ = plan_run(graph, last_uses_, executor, counts);
    for (const ConstantTensor& constant : graph.constants) held_outside_[groups_.of(constant.value)] = 1;
    for (std::size_t group = 0; group < groups_.count(); ++group) bytes_.push_back(groups_.bytes(group));
    const std::set<std::size_t> donated(options.donated_inputs.begin(), options.donated_inputs.end());
    for (std::size_t i = 0; i < graph.inputs.size(); ++i) {
      const std::size_t group = groups_.of(graph.inputs[i].value);
      ++values_alive_[group];
      if (!donated.contains(i)) held_outside_[group] = 1;
    }
    for (const RunMemoryOptions::Counted& each : options.counted_inputs) {
      const ValueId value = graph.inputs.at(each.input).value;
      const std::size_t group = groups_.of(value);
      if (place_[group] != kNowhere) continue;
      bytes_[group] = std::max(bytes_[group], each.bytes);
      add(value, 0).is_input = true;
    }
  }

  RunMemory run() {
    memory_.live.assign(graph_.nodes.size(), 0);
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) run(i);
    for (std::size_t group = 0; group < place_.size(); ++group)
      if (place_[group] != kNowhere) {
        LiveMemory& tensor = memory_.tensors[place_[group]];
        tensor.last = graph_.nodes.empty() ? 0 : graph_.nodes.size() - 1;
      }
    for_each_value(graph_.outputs, [&](ValueId value) {
      if (const std::size_t at = place_[groups_.of(value)]; at != kNowhere)
        memory_.tensors[at].is_result = true;
    });
    return std::move(memory_);
  }

 private:
  static std::vector<std::pair<ValueId, ValueId>> same_memory(const Graph& graph,
                                                              const RunMemoryOptions& options) {
    std::map<std::size_t, ValueId> first;
    std::vector<std::pair<ValueId, ValueId>> pairs;
    for (const RunMemoryOptions::Counted& each : options.counted_inputs) {
      const ValueId value = graph.inputs.at(each.input).value;
      if (const auto [known, is_new] = first.try_emplace(each.memory, value); !is_new)
        pairs.emplace_back(value, known->second);
    }
    return pairs;
  }

  LiveMemory& add(ValueId value, std::size_t node) {
    const std::size_t group = groups_.of(value);
    place_[group] = memory_.tensors.size();
    now_ += bytes_[group];
    LiveMemory& tensor = memory_.tensors.emplace_back();
    tensor.value = value;
    tensor.bytes = bytes_[group];
    tensor.first = node;
    return tensor;
  }

  void run(std::size_t index) {
    const Node& node = graph_.nodes[index];
    const Step& step = plan_->steps[index];
    std::size_t overwritten = kNowhere;
    if (step.call == &call_reusing) {
      const std::size_t group =
          groups_.of(ValueId{static_cast<std::int32_t>(plan_->reuses[step.special].dead)});
      // Only if nothing else is in that memory.
      if (values_alive_[group] == 1 && !held_outside_[group] && place_[group] != kNowhere)
        overwritten = group;
    }
    std::int64_t dropped = 0;
    std::set<std::size_t> made;
    for_each_value(node.results, [&](ValueId value) {
      const std::size_t group = groups_.of(value);
      const bool is_used = last_uses_.after(index, value);
      const bool is_new = place_[group] == kNowhere && values_alive_[group] == 0 && !held_outside_[group] &&
                          !groups_.is_given(group);
      values_alive_[group] += is_used ? 1 : 0;
      if (!is_new) return;
      if (overwritten != kNowhere) {
        // The same memory goes on under another name.
        LiveMemory& before = memory_.tensors[place_[overwritten]];
        before.last = index == 0 ? 0 : index - 1;
        now_ -= before.bytes;
        place_[overwritten] = kNowhere;
        overwritten = kNowhere;
      }
      if (is_used)
        add(value, index);
      else if (made.insert(group).second)
        dropped += bytes_[group];
    });
    memory_.live[index] = now_ + dropped;
    for (const Slot slot : step.frees) {
      const std::size_t group = groups_.of(ValueId{static_cast<std::int32_t>(slot)});
      if (--values_alive_[group] > 0 || place_[group] == kNowhere) continue;
      memory_.tensors[place_[group]].last = index;
      now_ -= bytes_[group];
      place_[group] = kNowhere;
    }
  }

  const Graph& graph_;
  const MemoryGroups groups_;
  const LastUses last_uses_;
  std::unique_ptr<ExecutionPlan> plan_;
  // By group: its entry in memory_.tensors while it is alive, and the number of slots that hold one of its
  // values.
  std::vector<std::size_t> place_;
  std::vector<std::int64_t> values_alive_;
  std::vector<char> held_outside_;
  std::vector<std::int64_t> bytes_;
  std::int64_t now_ = 0;
  RunMemory memory_;
};

}  // namespace

std::size_t RunMemory::peak_node() const {
  return static_cast<std::size_t>(std::max_element(live.begin(), live.end()) - live.begin());
}

std::int64_t RunMemory::peak_bytes() const { return live.empty() ? 0 : live[peak_node()]; }

RunMemory memory_of_run(const Graph& graph, const RunMemoryOptions& options) {
  return MemoryOfRun(graph, options).run();
}

}  // namespace penstock::graph
