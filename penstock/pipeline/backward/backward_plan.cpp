#include "penstock/pipeline/backward/backward_plan.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace penstock {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

// Operators that only view a weight, by the names of their nodes without the version at the end.
bool passes_weight_through(const Node& node) {
  static constexpr std::array<std::string_view, 14> kNames{
      "TBackward",         "ViewBackward",         "PermuteBackward",    "TransposeBackward",
      "ExpandBackward",    "ReshapeAliasBackward", "UnsafeViewBackward", "AliasBackward",
      "UnsqueezeBackward", "SqueezeBackward",      "ToCopyBackward",     "CloneBackward",
      "SliceBackward",     "SelectBackward"};
  const std::string full = node.name();
  std::string_view name = full;
  while (!name.empty() && name.back() >= '0' && name.back() <= '9') name.remove_suffix(1);
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

// The second part of a node that does not compute all its gradients at once (captured functions).
bool is_deferrable(Node& node) { return !node.is_traceable() && is_later_part(node); }

const AccumulateGrad* as_leaf(const NodeIndex::Entry& entry) {
  return entry.edges == 0 ? dynamic_cast<const AccumulateGrad*>(entry.node) : nullptr;
}

}  // namespace

NodeIndex::NodeIndex(const torch::autograd::edge_list& roots) {
  constexpr std::size_t kUsual = 512;
  slots_.resize(2 * kUsual);
  entries_.reserve(kUsual);
  targets_.reserve(2 * kUsual);
  bottom_up_.reserve(kUsual);
  struct Step {
    std::uint32_t number, edge;
  };
  std::vector<Step> path;
  path.reserve(kUsual);
  for (const Edge& root : roots) {
    if (!root.is_valid() || find(root.function.get()) != kNone) continue;
    path.push_back({add(root.function), 0});
    while (!path.empty()) {
      Step& step = path.back();
      const Entry& entry = entries_[step.number];
      if (step.edge == entry.edges) {
        bottom_up_.push_back(step.number);
        path.pop_back();
        continue;
      }
      const std::size_t place = entry.first_edge + step.edge;
      const Edge& edge = entry.node->next_edge(step.edge++);
      if (!edge.is_valid()) continue;
      if (const std::uint32_t known = find(edge.function.get()); known != kNone) {
        targets_[place] = known;
        continue;
      }
      const std::uint32_t found =
          add(edge.function);  // add() may reallocate entries and targets: no reference to them is held here
      targets_[place] = found;
      path.push_back({found, 0});
    }
  }
}

std::size_t NodeIndex::slot_of(const Node* node) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = (reinterpret_cast<std::uintptr_t>(node) >> 4) * 0x9E3779B97F4A7C15ull >> 20 & mask;
  while (slots_[slot].node && slots_[slot].node != node) slot = (slot + 1) & mask;
  return slot;
}

std::uint32_t NodeIndex::find(const Node* node) const { return slots_[slot_of(node)].number; }

std::uint32_t NodeIndex::add(const NodePtr& node) {
  if (2 * entries_.size() >= slots_.size()) grow();
  const auto number = size();
  slots_[slot_of(node.get())] = {node.get(), number};
  const auto edges = static_cast<std::uint32_t>(node->num_outputs());
  entries_.push_back({node.get(), &node, static_cast<std::uint32_t>(targets_.size()), edges});
  targets_.resize(targets_.size() + edges, kNone);
  return number;
}

void NodeIndex::grow() {
  std::vector<Slot> old(2 * slots_.size());
  old.swap(slots_);
  for (const Slot& slot : old)
    if (slot.node) slots_[slot_of(slot.node)] = slot;
}

BackwardPlan::BackwardPlan(const torch::autograd::edge_list& roots, const std::vector<NodePtr>& inputs)
    : index_(roots),
      upper_(index_.size()),
      source_(index_.size()),
      group_(index_.size()),
      first_half_(index_.size()) {
  mark_upper(inputs);
  for (std::uint32_t n = 0; n < index_.size(); ++n) group_[n] = n;
  group_lower();

  struct Group {
    bool large = false;  // has a weight of two dims or more
    bool has_source = false, has_divisible_source = false;
    bool crowded = false;  // has a sum of three gradients or more
  };
  std::vector<Group> groups(index_.size());
  std::vector<std::uint32_t> arriving(index_.size());
  for (const Edge& root : roots)
    if (root.is_valid()) ++arriving[index_.find(root.function.get())];
  for (std::uint32_t n = 0; n < index_.size(); ++n)
    for (std::uint32_t e = 0; e < index_.edges(n); ++e)
      if (const std::uint32_t to = index_.target(n, e); to != NodeIndex::kNone) ++arriving[to];
  bool any_crowded = false;
  for (std::uint32_t n = 0; n < index_.size(); ++n) {
    Group& g = groups[group_[n] = group(n)];
    if (source_[n]) {
      g.has_source = true;
      g.has_divisible_source |= !opaque(*index_[n].node);
    }
    if (upper_[n]) continue;
    // Whoever has split its backward into two nodes has decided that the second one is worth waiting.
    if (is_deferrable(*index_[n].node)) g.large = g.has_divisible_source = true;
    if (arriving[n] > 2) g.crowded = any_crowded = true;
    if (const AccumulateGrad* leaf = as_leaf(index_[n])) g.large |= leaf->variable.dim() > 1;
  }
  // From three gradients on, the order of additions matters. The second half keeps it by the sequence numbers
  // of the nodes, provided that these reflect the order in which the engine runs nodes.
  const bool unsure = any_crowded && !ordered();
  for (std::uint32_t n = 0; n < index_.size(); ++n) {
    const Group& g = groups[n];
    first_half_[n] = g.has_source && (!g.large || !g.has_divisible_source || (g.crowded && unsure));
  }
}

void BackwardPlan::mark_upper(const std::vector<NodePtr>& inputs) {
  bool any = false;
  for (const NodePtr& input : inputs)
    if (const std::uint32_t n = input ? index_.find(input.get()) : NodeIndex::kNone; n != NodeIndex::kNone)
      upper_[n] = any = true;
  if (!any) mark_upper_above_weights();
  for (const std::uint32_t n : index_.bottom_up())
    for (std::uint32_t e = 0; e < index_.edges(n) && !upper_[n]; ++e)
      if (const std::uint32_t to = index_.target(n, e); to != NodeIndex::kNone) upper_[n] = upper_[to];
}

// No input needs a gradient. The lowest operators that use weights take the place of the inputs: nodes that
// are not just a view of a weight, and all of whose edges lead to weights or views of them.
void BackwardPlan::mark_upper_above_weights() {
  std::vector<char> weight(index_.size());  // a weight or a view of one
  for (const std::uint32_t n : index_.bottom_up()) {
    bool any = as_leaf(index_[n]) != nullptr || is_deferrable(*index_[n].node), all = true;
    if (any) {
      weight[n] = true;
      continue;
    }
    for (std::uint32_t e = 0; e < index_.edges(n) && all; ++e)
      if (const std::uint32_t to = index_.target(n, e); to != NodeIndex::kNone) any = true, all = weight[to];
    if (!any || !all) continue;
    (passes_weight_through(*index_[n].node) ? weight : upper_)[n] = true;
  }
}

void BackwardPlan::group_lower() {
  for (std::uint32_t n = 0; n < index_.size(); ++n)
    for (std::uint32_t e = 0; e < index_.edges(n); ++e) {
      const std::uint32_t to = index_.target(n, e);
      if (to == NodeIndex::kNone || upper_[to]) continue;
      if (upper_[n]) source_[n] = true;
      join(n, to);
    }
}

std::uint32_t BackwardPlan::group(std::uint32_t number) {
  while (group_[number] != number) number = group_[number] = group_[group_[number]];
  return number;
}

void BackwardPlan::join(std::uint32_t a, std::uint32_t b) { group_[group(a)] = group(b); }

// The engine runs the ready node with the highest sequence number. If every edge leads to a lower number, and
// no two nodes share one, nodes run in descending order of numbers, whatever else is in the graph. This may
// not hold for graphs built by several threads, and for views that were regenerated after an in-place
// operator. (Accumulators have the highest number of all, and run as soon as they are ready.)
bool BackwardPlan::ordered() const {
  std::vector<std::uint64_t> numbers;
  numbers.reserve(index_.size());
  for (std::uint32_t n = 0; n < index_.size(); ++n) {
    const std::uint64_t number = index_[n].node->sequence_nr();
    if (number == UINT64_MAX) continue;
    numbers.push_back(number);
    for (std::uint32_t e = 0; e < index_.edges(n); ++e) {
      const std::uint32_t to = index_.target(n, e);
      if (to == NodeIndex::kNone) continue;
      const std::uint64_t below = index_[to].node->sequence_nr();
      if (below >= number && below != UINT64_MAX) return false;
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end();
}

}  // namespace penstock
