// From one set of placements to another: the cheapest sequence of collectives, each on one axis of the mesh.
//
//   plan_redistribute({.shape = {1024, 1024}, .element_bytes = 4}, {2, 4}, {Partial{}, Replicate{}}, {Shard{0}, Shard{1}})
//     axis 1  R -> S(1)        slice
//     axis 0  P(sum) -> S(0)   reduce_scatter     524288 bytes
//
// A step changes the placement of one axis. On one dim only the axis that split it last can be joined again, and a split
// is always within what is there; so several axes on one dim are undone in the reverse order. The search goes over all
// sequences of such steps (Dijkstra over placements), so no cheaper one exists in the cost model.
//
// Arithmetic on the whole tensor's shape alone: every rank finds the same plan. Pure; nothing here knows of Torch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/placement.h"

namespace penstock {

enum class RedistributeKind {
  Slice,          // R -> S: each rank keeps its part
  AllGather,      // S -> R
  AllToAll,       // S -> S on another dim
  AllReduce,      // P -> R
  ReduceScatter,  // P -> S
  Embed,          // S -> P(sum): each rank puts its part into zeros
  Term            // R -> P: the first rank keeps its value, for a sum the others have zeros
};

std::string_view to_text(RedistributeKind kind);

struct RedistributeStep {
  RedistributeKind kind = RedistributeKind::Slice;
  int axis = 0;
  Placement from, to;
  Placements before, after;    // of all axes
  std::int64_t bytes = 0;      // that the busiest rank sends in a ring; 0 without communication
  double seconds = 0;          // in the cost model
};

struct RedistributePlan {
  std::vector<RedistributeStep> steps;
  std::int64_t bytes = 0;
  double seconds = 0;

  std::string to_string() const;
};

// What a plan is for.
struct TensorSize {
  std::vector<std::int64_t> shape;
  std::int64_t element_bytes = 4;
};

// What communication costs along an axis. One entry serves all axes; else one per axis.
struct AxisCost {
  double latency_s = 20e-6;
  double bytes_per_s = 10e9;
};

// Whether a whole value may become terms. Users' redistributions refuse it: it hides a reduction that somebody pays for
// later. Operators need it, for the bias that is added to a sum of products.
enum class PartialTarget { Refuse, Allow };

// Throws ValueError for placements that do not fit the mesh or the tensor, and, where that is refused, for a target that is
// Partial while the source is neither the same nor, for a sum, a shard.
RedistributePlan plan_redistribute(const TensorSize& tensor, const std::vector<std::int64_t>& mesh_shape, const Placements& from,
                                   const Placements& to, const std::vector<AxisCost>& costs = {},
                                   PartialTarget partial_target = PartialTarget::Refuse);

}  // namespace penstock
