// Plans a redistribution: the cheapest sequence of collectives from one set of placements to another, each on
// one mesh axis.
//
//   plan_redistribute({.shape = {1024, 1024}, .element_bytes = 4}, {2, 4}, {Partial{}, Replicate{}},
//       {Shard{0}, Shard{1}})
//     axis 1  R -> S(1)        slice
//     axis 0  P(sum) -> S(0)   reduce_scatter     524288 bytes
//
// A step changes the placement of one axis. A dim can only be joined along the axis that split it last, and a
// split divides what is already split; so several axes on one dim are undone in reverse order. The search
// covers all sequences of such steps (Dijkstra over placements), so no cheaper one exists in the cost model.
//
// Depends only on the shape of the whole tensor, so every rank finds the same plan. Pure; independent of
// Torch.
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
  Embed,          // S -> P(sum): each rank pads its part with zeros
  Term            // R -> P: the first rank keeps its value; for a sum the others have zeros
};

std::string_view to_text(RedistributeKind kind);

struct RedistributeStep {
  RedistributeKind kind = RedistributeKind::Slice;
  int axis = 0;
  Placement from, to;
  Placements before, after;  // of all axes
  std::int64_t bytes = 0;    // sent by the busiest rank in a ring; 0 without communication
  double seconds = 0;        // in the cost model
};

struct RedistributePlan {
  std::vector<RedistributeStep> steps;
  std::int64_t bytes = 0;
  double seconds = 0;

  std::string to_string() const;
};

// The tensor to redistribute.
struct TensorSize {
  std::vector<std::int64_t> shape;
  std::int64_t element_bytes = 4;
};

// The cost of communication along an axis. Pass one entry for all axes, or one per axis.
struct AxisCost {
  double latency_s = 20e-6;
  double bytes_per_s = 10e9;
};

// Whether a whole value may become Partial. Refused for redistributions by users, because it hides a
// reduction that has to be done later. Operators need it, for the bias that is added to a sum of products.
enum class PartialTarget { Refuse, Allow };

// Throws ValueError for placements that do not match the mesh or the tensor, and, with PartialTarget::Refuse,
// for a target that is Partial while the source is neither the same nor, for a sum, a shard.
RedistributePlan plan_redistribute(const TensorSize& tensor, const std::vector<std::int64_t>& mesh_shape,
                                   const Placements& from, const Placements& to,
                                   const std::vector<AxisCost>& costs = {},
                                   PartialTarget partial_target = PartialTarget::Refuse);

}  // namespace penstock
