// Shared by the drawings of a sharding: the parts of all ranks, and the cells between their borders. Private
// to this folder; independent of Torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/device_mesh.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/placement.h"

namespace penstock::detail {

struct RankPart {
  int rank = 0;
  std::vector<std::int64_t> coordinate;
  std::vector<std::vector<Segment>> segments;  // [dim]
  std::size_t term = 0;  // ranks with equal `term` hold equal values at the same indices
  bool empty = false;
};

// The ranks that hold a cell: [term][i], both ascending. More than one term only where an axis is Partial.
using CellRanks = std::vector<std::vector<int>>;

struct ShardGrid {
  // Throws ValueError for placements that do not fit the mesh or the tensor.
  ShardGrid(const std::vector<std::int64_t>& global_shape, const DeviceMesh& mesh,
            const Placements& placements);

  std::vector<std::int64_t> shape;
  std::vector<std::string> names;  // of the axes; empty if they have none
  std::vector<std::int64_t> mesh_shape;
  Placements placements;                    // normalized
  std::vector<RankPart> parts;              // row-major in the mesh
  std::vector<std::vector<Segment>> cells;  // [dim]: the ranges between the borders of all parts
  std::vector<int> drawn;                   // the drawn dims, at most two: those in the most pieces
  bool hides_splits = false;  // a dim that is not drawn is split: ranks of one cell hold different parts

  // By cells of the drawn dims; `row` is ignored if one dim is drawn, both are if none is.
  CellRanks ranks_of(std::size_t row, std::size_t column) const;
  const std::vector<Segment>& columns() const;
  const std::vector<Segment>& rows() const;
  bool has_elements() const;

  bool has_partial() const;
  // Between partial values: "+", "min", "max", "avg", "*", or "&" if the axes differ.
  std::string term_sign() const;
  // "dp=2 x tp=2", "2 x 2 ranks".
  std::string mesh_text() const;
  // "tp", "axis 1".
  std::string axis_text(std::size_t axis) const;
  // "[5, 4] as [S(0), S(1)]".
  std::string title() const;
  // Notes for the reader: partial values, equal values, ranks that hold nothing. `pictured`: below a picture.
  std::vector<std::string> notes(bool pictured) const;
};

// "0-1, 4"; "all" for the whole dim, "nothing" for none of it. More than eight ranges are truncated.
std::string ranges_text(const std::vector<Segment>& segments, std::int64_t size);
// "0-1", "4".
std::string range_text(const Segment& segment);
// "0, 2 + 1, 3" on lines of about `width`; every rank is listed, four or more consecutive ones as "0-7".
std::vector<std::string> label_lines(const CellRanks& ranks, const std::string& sign, std::size_t width = 24);

}  // namespace penstock::detail
