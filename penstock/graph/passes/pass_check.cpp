#include "penstock/graph/passes/pass_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/graph/ir/constant_value.h"
#include "penstock/graph/ir/graph.h"
#include "penstock/graph/ir/shape_inference.h"
#include "penstock/graph/ir/state_operator.h"
#include "penstock/graph/passes/effect_check.h"

namespace penstock::graph {
namespace {

class PassCheck {
 public:
  PassCheck(const Graph& before, const Graph& after, std::string_view pass)
      : before_(before), after_(after), pass_(pass) {}

  void run() const {
    try {
      verify(after_);
    } catch (const InvariantError& error) {
      fail(error.what());
    }
    if (const std::size_t writing = count_writes(after_); writing > 0)
      fail(fmt::format("{} nodes write memory, expected none", writing));
    same_ends();
    same_memory();
    same_places_of_outputs();
    same_effects();
    if (!after_.table) shapes_follow();
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw InvariantError(fmt::format("graph: the pass '{}' has broken the graph: {}", pass_, why));
  }

  void same_ends() const {
    if (before_.inputs.size() != after_.inputs.size() || before_.outputs.size() != after_.outputs.size())
      fail(fmt::format("it has {} inputs and {} outputs, expected {} and {}", after_.inputs.size(),
                       after_.outputs.size(), before_.inputs.size(), before_.outputs.size()));
    for (std::size_t i = 0; i < before_.inputs.size(); ++i)
      if (before_.inputs[i].name != after_.inputs[i].name ||
          before_[before_.inputs[i].value].geometry != after_[after_.inputs[i].value].geometry)
        fail(fmt::format("input {} is {} '{}', expected {} '{}'", i,
                         to_text(after_[after_.inputs[i].value].geometry), after_.inputs[i].name,
                         to_text(before_[before_.inputs[i].value].geometry), before_.inputs[i].name));
    for (std::size_t i = 0; i < before_.outputs.size(); ++i) {
      const Operand &was = before_.outputs[i], &is = after_.outputs[i];
      bool same = was.kind == is.kind && was.values.size() == is.values.size() &&
                  (was.kind != Operand::Kind::Constant || same_constant(was.constant, is.constant));
      for (std::size_t j = 0; same && j < was.values.size(); ++j) {
        same = (was.values[j] == kNoValue) == (is.values[j] == kNoValue);
        if (same && was.values[j] != kNoValue)
          same = before_[was.values[j]].geometry == after_[is.values[j]].geometry;
      }
      if (!same)
        fail(fmt::format("output {} is {}, expected {}", i, described(after_, is), described(before_, was)));
    }
  }

  static std::string described(const Graph& graph, const Operand& output) {
    return output.value() == kNoValue ? to_text(output)
                                      : to_text(output) + ": " + to_text(graph[output.value()].geometry);
  }

  // Which inputs and outputs are the same tensor, and which are in the same memory.
  static std::vector<std::pair<std::size_t, std::size_t>> memory_of(const Graph& graph) {
    std::map<ValueId, std::size_t> values;
    std::map<StorageId, std::size_t> storages;
    std::vector<std::pair<std::size_t, std::size_t>> all;
    const auto add = [&](ValueId value) {
      all.emplace_back(values.try_emplace(value, values.size()).first->second,
                       storages.try_emplace(graph[value].storage, storages.size()).first->second);
    };
    for (const Placeholder& input : graph.inputs) add(input.value);
    for_each_value(graph.outputs, add);
    return all;
  }

  void same_memory() const {
    const auto was = memory_of(before_), is = memory_of(after_);
    for (std::size_t i = 0; i < was.size(); ++i)
      if (was[i] != is[i])
        fail(fmt::format("the {} shares a tensor or memory with others than before",
                         i < before_.inputs.size()
                             ? fmt::format("input {}", i)
                             : fmt::format("tensor {} among the outputs", i - before_.inputs.size())));
  }

  // What a call writes to an input is an output, too: two of them must not be exchanged.
  void same_places_of_outputs() const {
    std::vector<ValueId> was, is;
    for_each_value(before_.outputs, [&](ValueId value) { was.push_back(value); });
    for_each_value(after_.outputs, [&](ValueId value) { is.push_back(value); });
    if (was == is) return;
    std::vector<ValueId> sorted_was = was, sorted_is = is;
    std::sort(sorted_was.begin(), sorted_was.end());
    std::sort(sorted_is.begin(), sorted_is.end());
    if (sorted_was == sorted_is)
      fail("it returns the same tensors in another order; return each at the place where it was");
  }

  void same_effects() const {
    if (const std::string difference = difference_of_effects(before_, after_); !difference.empty())
      fail(difference);
  }

  // Not of operators on tensors that begin inside of their memory: fake ones begin at its start, where
  // as_strided refers to other places. Nor of those that are given the state of a generator, which a fake
  // tensor cannot hold.
  void shapes_follow() const {
    for (const Node& node : after_.nodes) {
      bool at_start = true;
      for_each_value(node.arguments,
                     [&](ValueId value) { at_start &= after_[value].geometry.storage_offset == 0; });
      if (!at_start || operator_inside(node.op)) continue;
      const Stack results = run_on_fake_arguments(after_, node.op, node.arguments);
      for (std::size_t i = 0; i < results.size() && i < node.results.size(); ++i) {
        if (!results[i].isTensor() || node.results[i].value() == kNoValue) continue;
        const Geometry is = geometry_of(results[i].toTensor());
        const Geometry& noted = after_[node.results[i].value()].geometry;
        if (is.sizes != noted.sizes || is.dtype != noted.dtype || is.device != noted.device)
          fail(fmt::format("{} makes {}", to_text(after_, node), to_text(is)));
      }
    }
  }

  const Graph &before_, &after_;
  std::string_view pass_;
};

}  // namespace

void check_pass(const Graph& before, const Graph& after, std::string_view pass) {
  PassCheck(before, after, pass).run();
}

}  // namespace penstock::graph
