#include "penstock/graph/stages/pipe_cut.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "penstock/errors.h"

namespace penstock::graph {
namespace {

class Cutting {
 public:
  Cutting(const ForwardTrace& trace, const std::vector<InputKind>& kinds,
          const std::vector<std::size_t>& places)
      : trace_(trace), graph_(trace.graph), kinds_(kinds) {
    std::size_t first = 0;
    for (std::size_t i = 0; i <= places.size(); ++i) {
      const std::size_t end = i < places.size() ? places[i] : graph_.nodes.size();
      cut_.stages.push_back({.first = first,
                             .end = end,
                             .functions = {},
                             .state = {},
                             .keywords = {},
                             .main_inputs = {},
                             .main_outputs = {},
                             .skip_inputs = {},
                             .skip_outputs = {}});
      first = end;
    }
  }

  PipeCut run() {
    find_origins();
    find_uses();
    refuse_layouts();
    give_state();
    route();
    return std::move(cut_);
  }

 private:
  static constexpr int kNowhere = -1;

  void find_origins() {
    origin_.assign(graph_.values.size(), kNowhere);
    input_of_.assign(graph_.values.size(), kNoInput);
    for (std::size_t i = 0; i < graph_.inputs.size(); ++i) {
      input_of_[index_of(graph_.inputs[i].value)] = i;
      if (kinds_.at(i) != InputKind::Positional) continue;
      origin_[index_of(graph_.inputs[i].value)] = 0;
      cut_.positional.push_back(i);
    }
    for (int stage = 0; stage < stages(); ++stage)
      for (std::size_t i = at(stage).first; i < at(stage).end; ++i)
        for_each_value(graph_.nodes[i].results, [&](ValueId value) {
          // The result of a node that writes is the value that was written.
          if (origin_[index_of(value)] == kNowhere && input_of_[index_of(value)] == kNoInput)
            origin_[index_of(value)] = stage;
        });
  }

  void find_uses() {
    uses_.resize(graph_.values.size());
    for (int stage = 0; stage < stages(); ++stage)
      for (std::size_t i = at(stage).first; i < at(stage).end; ++i) {
        const auto use = [&](ValueId value) { uses_[index_of(value)].insert(stage); };
        for_each_value(graph_.nodes[i].arguments, use);
      }
    for (std::size_t i = 0; i < trace_.functions.size(); ++i) {
      const CustomFunction& function = trace_.functions[i];
      const int stage = cut_.stage_of(function.end == 0 ? 0 : function.end - 1);
      at(stage).functions.push_back(i);
      function.for_each_use([&](ValueId value) { uses_[index_of(value)].insert(stage); });
    }
    for_each_value(graph_.outputs, [&](ValueId value) { uses_[index_of(value)].insert(stages() - 1); });
  }

  // The memory of a value that was sent is laid out as the sender had it only if that was dense, and begins
  // elsewhere.
  void refuse_layouts() const {
    std::vector<int> made(static_cast<std::size_t>(graph_.storages), kNowhere);
    for (std::size_t i = graph_.values.size(); i-- > 0;)
      if (origin_[i] != kNowhere) made[index_of(graph_.values[i].storage)] = origin_[i];
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (node.op.operator_name().name != "aten::as_strided") continue;
      const ValueId of = node.arguments[0].value();
      const int stage = cut_.stage_of(i);
      if (of == kNoValue || made[index_of(graph_[of].storage)] == kNowhere) continue;
      const bool own = made[index_of(graph_[of].storage)] == stage && !is_positional(graph_[of].storage);
      if (!own)
        throw ValueError(fmt::format(
            "trace_pipeline: {} reads memory by its layout, and the memory comes from {}; split the "
            "model so that both are in one stage, or use another view",
            trace_.line(i), is_positional(graph_[of].storage) ? "an argument" : "another stage"));
    }
  }

  bool is_positional(StorageId storage) const {
    return std::any_of(cut_.positional.begin(), cut_.positional.end(), [&](std::size_t input) {
      return graph_[graph_.inputs[input].value].storage == storage;
    });
  }

  void give_state() {
    for (std::size_t i = 0; i < graph_.inputs.size(); ++i) {
      const std::set<int>& users = uses_[index_of(graph_.inputs[i].value)];
      if (kinds_[i] == InputKind::Positional) continue;
      if (users.empty() && kinds_[i] == InputKind::State) cut_.unused.push_back(i);
      for (const int stage : users)
        (kinds_[i] == InputKind::State ? at(stage).state : at(stage).keywords).push_back(i);
    }
  }

  void route() {
    for (std::size_t i = 0; i < graph_.values.size(); ++i) {
      int from = origin_[i];
      if (from == kNowhere) continue;  // state, keyword arguments, constants, values of backwards
      const ValueId value{static_cast<std::int32_t>(i)};
      for (const int to : uses_[i]) {
        if (to <= from) continue;
        cut_.hops.push_back({value, from, to});
        from = to;
      }
    }
    for (const Hop& hop : cut_.hops) {
      (hop.skips() ? at(hop.from).skip_outputs : at(hop.from).main_outputs).push_back(hop.value);
      (hop.skips() ? at(hop.to).skip_inputs : at(hop.to).main_inputs).push_back(hop.value);
    }
  }

  CutStage& at(int stage) { return cut_.stages[static_cast<std::size_t>(stage)]; }
  int stages() const { return static_cast<int>(cut_.stages.size()); }

  static constexpr std::size_t kNoInput = static_cast<std::size_t>(-1);
  const ForwardTrace& trace_;
  const Graph& graph_;
  const std::vector<InputKind>& kinds_;
  std::vector<int> origin_;            // by value: the stage that has it first
  std::vector<std::size_t> input_of_;  // by value: the input of the graph that it is
  std::vector<std::set<int>> uses_;    // by value: stages
  PipeCut cut_;
};

}  // namespace

int PipeCut::stage_of(std::size_t node) const {
  const auto after =
      std::upper_bound(stages.begin(), stages.end(), node,
                       [](std::size_t value, const CutStage& stage) { return value < stage.first; });
  return static_cast<int>(std::distance(stages.begin(), after)) - 1;
}

PipeCut cut_forward(const ForwardTrace& trace, const std::vector<InputKind>& kinds,
                    const std::vector<std::size_t>& places) {
  return Cutting(trace, kinds, places).run();
}

}  // namespace penstock::graph
