// Draws which rank holds which part of a tensor, as text and as SVG.
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
// Cells are the ranges between the borders of all ranks' parts, so uneven and strided shards are exact. If an
// axis is Partial, a sign joins the partial values: "0 + 1", "0, 2 max 1, 3". A tensor of more than two dims
// is drawn as a table of index ranges by rank, and a picture of the two dims that are split into the most
// pieces.
//
// Depends only on the mesh and the placements, not on Torch; a mesh of ranks that are not running can be
// drawn. dtensor_drawing.h draws a distributed tensor. Throws ValueError for placements that do not match the
// mesh or the tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/device_mesh.h"
#include "penstock/placement.h"

namespace penstock {

// Lines, each ended by a newline. A tensor in too many pieces for a grid gets only the table.
std::string draw_sharding_text(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
                               const Placements& placements);

// A self-contained <svg>: cells in proportion, coloured by rank (striped if several ranks hold a cell,
// hatched if they hold partial values), and a legend of what each rank holds. Follows the viewer's light or
// dark theme.
std::string draw_sharding_svg(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
                              const Placements& placements);

}  // namespace penstock
