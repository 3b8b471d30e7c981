// How the dims of different tensors correspond to each other in one nest of loops.
//
//   IndexSpace space;
//   auto rows = space.dim(24), columns = space.dim(8);       // a tensor [24, 8]
//   auto batch = space.dim(4), length = space.dim(6);        // another, [4, 6, 8]
//   space.unify(rows, joined({batch, length}));              // its view as [24, 8]: rows is split in two
//
// A dim is a list of axes, outermost first, the product of whose sizes is that of the dim; a dim of size 1
// has none. To unify two dims means that an element has the same place in both; axes are split where that is
// necessary. What a dim consists of is asked by `leaves`, since later calls may split its axes further.
// Thread safety: that of a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace penstock::graph {

class IndexSpace {
 public:
  using Axis = int;
  using Dim = std::vector<Axis>;

  // A new dim of a size of at least 1.
  Dim dim(std::int64_t size);
  // Makes them the same. Returns false if no split of their axes does; the space is then of no use any more.
  bool unify(const Dim& a, const Dim& b);
  // The axes that a dim consists of now.
  Dim leaves(const Dim& dim) const;
  std::int64_t size(Axis leaf) const { return axes_[static_cast<std::size_t>(leaf)].size; }
  std::int64_t size_of(const Dim& dim) const;
  // The dims of a view with other sizes of a tensor with these dims. std::nullopt if no split of the axes
  // makes them.
  std::optional<std::vector<Dim>> viewed(const std::vector<Dim>& dims,
                                         const std::vector<std::int64_t>& sizes);

 private:
  struct AxisState {
    std::int64_t size = 1;
    Axis same = -1;               // this one is another one
    Axis outer = -1, inner = -1;  // it was split in two
  };
  Axis add(std::int64_t size);
  void append_leaves(Axis axis, Dim& leaves) const;

  std::vector<AxisState> axes_;
};

// The dims one after the other, as one.
IndexSpace::Dim joined(const std::vector<IndexSpace::Dim>& dims);

}  // namespace penstock::graph
