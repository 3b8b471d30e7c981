#include "penstock/graph/passes/replacement.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {

VisibleMemory::VisibleMemory(const Graph& graph)
    : memory_(static_cast<std::size_t>(graph.storages), 0), is_output_(graph.values.size(), 0) {
  const auto mark = [&](ValueId value, std::uint8_t what) {
    memory_[index_of(graph[value].storage)] |= what;
  };
  for (const Placeholder& input : graph.inputs) mark(input.value, kGiven);
  for (const ConstantTensor& constant : graph.constants) mark(constant.value, kGiven);
  for_each_value(graph.outputs, [&](ValueId value) {
    mark(value, kOutput);
    is_output_[index_of(value)] = 1;
  });
}

Replacement::Replacement(Graph& graph) : graph_(graph), stands_for_(graph.values.size()) {
  for (std::size_t i = 0; i < stands_for_.size(); ++i) stands_for_[i] = ValueId{static_cast<std::int32_t>(i)};
}

void Replacement::translate(std::vector<Operand>& operands) const {
  for (Operand& operand : operands)
    for (ValueId& value : operand.values) value = now(value);
}

std::int32_t Replacement::root_of(std::int32_t storage) const {
  while (joined_[static_cast<std::size_t>(storage)] != storage)
    storage = joined_[static_cast<std::size_t>(storage)];
  return storage;
}

void Replacement::put(ValueId by, ValueId instead_of) {
  PENSTOCK_INVARIANT(now(by) == by, "a value stands for another one, but has been replaced itself");
  stands_for_[index_of(instead_of)] = by;
  const auto from = static_cast<std::int32_t>(graph_[instead_of].storage);
  const auto to = static_cast<std::int32_t>(graph_[by].storage);
  if (from == to) return;
  if (joined_.empty()) {
    joined_.resize(static_cast<std::size_t>(graph_.storages));
    std::iota(joined_.begin(), joined_.end(), 0);
  }
  // Memory is joined in the order of the nodes, so that the way to the root is short: each storage is put
  // under the root of an earlier one.
  const std::int32_t root = root_of(to);
  joined_[static_cast<std::size_t>(to)] = root;
  joined_[static_cast<std::size_t>(root_of(from))] = root;
}

void Replacement::finish() {
  translate(graph_.outputs);
  if (joined_.empty()) return;
  for (Value& value : graph_.values)
    value.storage = StorageId{root_of(static_cast<std::int32_t>(value.storage))};
}

int OperatorNumbers::of(const c10::OperatorHandle& op) const {
  const std::size_t index = operator_index(op);
  if (index >= known_.size()) known_.resize(index + 64, -2);
  std::int16_t& number = known_[index];
  if (number == -2) {
    const auto found = std::find(names_, names_ + count_, std::string_view(traits_of(op).name));
    number = found == names_ + count_ ? std::int16_t{-1} : static_cast<std::int16_t>(found - names_);
  }
  return number;
}

bool holds_for_all_sizes(const Graph& graph, const Geometry& geometry) {
  if (geometry.symbolic == kNotSymbolic) return true;
  if (!graph.table) return false;
  const SymbolicGeometry& all = graph.table->geometries.at(static_cast<std::size_t>(geometry.symbolic));
  const auto known = [](const auto& expression) { return expression.has_value(); };
  return std::all_of(all.sizes.begin(), all.sizes.end(), known) &&
         std::all_of(all.strides.begin(), all.strides.end(), known) && known(all.storage_offset);
}

void erase_nodes(Graph& graph, const std::vector<char>& gone) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    if (!gone[i]) {
      if (kept != i) graph.nodes[kept] = std::move(graph.nodes[i]);
      ++kept;
    }
  graph.nodes.erase(graph.nodes.begin() + static_cast<std::ptrdiff_t>(kept), graph.nodes.end());
}

}  // namespace penstock::graph
