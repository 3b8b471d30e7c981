// Which rank holds which part of a tensor, as text and as a picture.
//
//   DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, 0, 4);
//   fmt::print("{}", draw_sharding_text({5, 4}, mesh, {Shard{0}, Replicate{}}));
//
//     [5, 4] as [S(0), R] on dp=2 x tp=2
//     dim 0 down, dim 1 to the right; cells name ranks
//
//           0-3
//         +------+
//     0-2 | 0, 1 |
//         +------+
//     3-4 | 2, 3 |
//         +------+
//     ranks with a comma between them hold the same values
//
// Cells are the ranges between the borders of all ranks' parts, so uneven and strided shards come out exactly. Where an axis
// is Partial, a sign joins the terms: "0 + 1", "0, 2 max 1, 3". A tensor of more than two dims is a table of index ranges by
// rank, and a picture of the two dims that are in most pieces.
//
// Functions of the mesh and the placements alone: nothing here knows of Torch, and a mesh of ranks that do not run can be
// drawn. dtensor_drawing.h draws a distributed tensor. Throw ValueError for placements that do not fit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/device_mesh.h"
#include "penstock/placement.h"

namespace penstock {

// Lines, the last one ended too. A tensor in too many pieces for a grid gets the table alone.
std::string draw_sharding_text(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements);

// One <svg> without references to anything outside: cells in proportion, coloured by rank (stripes where several ranks hold
// one cell, hatched where they hold terms), and a legend that says what each rank holds. Follows the light or dark theme of the
// viewer.
std::string draw_sharding_svg(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements);

}  // namespace penstock
