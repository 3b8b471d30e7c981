// Decides which nodes of an autograd graph run in which half of a split backward. split_backward.h explains
// the halves.
//
// Terms. An *upper* node reaches an input of the stage; a *lower* node does not. Lower nodes that are
// connected with each other, or that share an upper node leading to them, form a *group*: all weights of a
// group are computed in the same half, so that no sum of gradients is split between halves. An *opaque* node
// computes all of its gradients in one call (custom functions, in-place operators on views, nodes with post
// hooks); other nodes compute only the requested gradients and may be called once per half. A node that
// leaves some of its gradients to a second one (LaterPart, a captured function) divides itself: the second
// node is a lower one, and counts as a weight.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/pipeline/backward/graph_node.h"

namespace penstock {

// The nodes reachable from the roots, numbered, with the targets of their edges as numbers.
class NodeIndex {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Entry {
    torch::autograd::Node* node;
    const NodePtr* owner;             // points into the graph or the roots: copy it before edges change
    std::uint32_t first_edge, edges;  // in targets
  };

  explicit NodeIndex(const torch::autograd::edge_list& roots);

  std::uint32_t size() const { return static_cast<std::uint32_t>(entries_.size()); }
  const Entry& operator[](std::uint32_t number) const { return entries_[number]; }
  std::uint32_t edges(std::uint32_t number) const { return entries_[number].edges; }
  std::uint32_t target(std::uint32_t number, std::uint32_t edge) const {
    return targets_[entries_[number].first_edge + edge];
  }
  // Topological order: a node comes after all nodes it leads to.
  const std::vector<std::uint32_t>& bottom_up() const { return bottom_up_; }
  std::uint32_t find(const torch::autograd::Node* node) const;  // kNone if it is not in the graph

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
  // `inputs` are the gradient accumulators of the stage's inputs; null entries are skipped.
  BackwardPlan(const torch::autograd::edge_list& roots, const std::vector<NodePtr>& inputs);

  const NodeIndex& index() const { return index_; }
  bool upper(std::uint32_t number) const { return upper_[number]; }
  // Returns whether the first half runs this node.
  bool in_first_half(std::uint32_t number) const { return upper_[number] || first_half_[group_[number]]; }
  // Returns whether this is an upper node with edges that are left for the second half.
  bool waits(std::uint32_t number) const {
    return upper_[number] && source_[number] && !first_half_[group_[number]];
  }
  static bool opaque(torch::autograd::Node& node) {
    return !node.is_traceable() || !node.post_hooks().empty();
  }

 private:
  void mark_upper(const std::vector<NodePtr>& inputs);
  void mark_upper_above_weights();
  void group_lower();
  bool ordered() const;
  std::uint32_t group(std::uint32_t number);
  void join(std::uint32_t a, std::uint32_t b);

  NodeIndex index_;
  std::vector<char> upper_, source_;  // source: an upper node with an edge to a lower one
  std::vector<std::uint32_t> group_;  // the number of one node of the group
  std::vector<char> first_half_;      // by group
};

}  // namespace penstock
