// Which nodes of a graph belong to which half of a split backward. The halves themselves are explained in split_backward.h.
//
// Terms. An *upper* node reaches an input of the stage; a *lower* one does not. Lower nodes that are connected with each other, or by
// an upper node that leads to both, form a *group*: all of its weights are done in the same half, so that no sum of gradients is
// ever taken in two parts. An *opaque* node computes all of its gradients in one call (custom functions, in-place operators on views,
// nodes with hooks after them); the others compute those that are asked for, and may be called once for each half.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/pipeline/backward/graph_node.h"

namespace penstock {

// The nodes that roots lead to, numbered, with the targets of their edges as numbers.
class NodeIndex {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Entry {
    torch::autograd::Node* node;
    const NodePtr* owner;      // somewhere in the graph or in the roots: copy it before edges change
    std::uint32_t first_edge, edges;  // in targets
  };

  explicit NodeIndex(const torch::autograd::edge_list& roots);

  std::uint32_t size() const { return static_cast<std::uint32_t>(entries_.size()); }
  const Entry& operator[](std::uint32_t number) const { return entries_[number]; }
  std::uint32_t edges(std::uint32_t number) const { return entries_[number].edges; }
  std::uint32_t target(std::uint32_t number, std::uint32_t edge) const { return targets_[entries_[number].first_edge + edge]; }
  // A node stands after all that it leads to.
  const std::vector<std::uint32_t>& bottom_up() const { return bottom_up_; }
  std::uint32_t find(const torch::autograd::Node* node) const;  // kNone when it is not there

 private:
  struct Slot {
    const torch::autograd::Node* node = nullptr;
    std::uint32_t number = kNone;
  };
  std::size_t slot_of(const torch::autograd::Node* node) const;
  std::uint32_t add(const NodePtr& node);
  void grow();

  std::vector<Entry> entries_;
  std::vector<std::uint32_t> targets_, bottom_up_;
  std::vector<Slot> slots_;  // open addressing, a power of two
};

class BackwardPlan {
 public:
  // `inputs` are the accumulators of the stage's inputs; null ones are passed over.
  BackwardPlan(const torch::autograd::edge_list& roots, const std::vector<NodePtr>& inputs);

  const NodeIndex& index() const { return index_; }
  bool upper(std::uint32_t number) const { return upper_[number]; }
  // Whether the first half runs this node.
  bool in_first_half(std::uint32_t number) const { return upper_[number] || first_half_[group_[number]]; }
  // Whether this is an upper node some of whose edges wait for the second half.
  bool waits(std::uint32_t number) const { return upper_[number] && source_[number] && !first_half_[group_[number]]; }
  static bool opaque(torch::autograd::Node& node) { return !node.is_traceable() || !node.post_hooks().empty(); }

 private:
  void mark_upper(const std::vector<NodePtr>& inputs);
  void mark_upper_above_weights();
  void group_lower();
  bool ordered() const;
  std::uint32_t group(std::uint32_t number);
  void join(std::uint32_t a, std::uint32_t b);

  NodeIndex index_;
  std::vector<char> upper_, source_;    // source: an upper node with an edge to a lower one
  std::vector<std::uint32_t> group_;    // the number of one of its nodes
  std::vector<char> first_half_;        // by group
};

}  // namespace penstock
