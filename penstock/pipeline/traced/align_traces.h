// Which nodes of two traces of one module correspond: of other sizes, or in another mode.
//
//   const std::vector<std::size_t> other = aligned_nodes(trace, in_evaluation);
//   other[12];                                        // the node of the other trace, or kNotAligned
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstddef>
#include <vector>

#include "penstock/graph/stages/forward_trace.h"

namespace penstock {

inline constexpr std::size_t kNotAligned = static_cast<std::size_t>(-1);

// By node of `trace`, ascending: a longest common subsequence of nodes with the same operator, in the same
// module, that take the same parameters and buffers. Among the longest ones, one whose nodes also take
// results of the same operators, so that what one trace has in addition (a dropout) does not take the place
// of its neighbour. Costs the product of the lengths of what differs.
std::vector<std::size_t> aligned_nodes(const graph::ForwardTrace& trace, const graph::ForwardTrace& other);

}  // namespace penstock
