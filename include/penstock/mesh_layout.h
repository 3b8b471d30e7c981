// Positions of the ranks of a mesh in a list of ranks: a size and a stride per axis, without the ranks.
//
//   MeshLayout grid({2, 4});                // (2, 4):(4, 1)
//   grid.index({1, 2});                     // 6: the seventh rank of the list
//   grid.slice({1});                        // (4):(1), the inner axis alone
//   grid.flatten({0, 1});                   // (8):(1), one stride is enough
//   MeshLayout({2, 2, 2}).flatten({0, 2});  // ((2, 2)):((4, 1)), one axis whose steps are 1, 3, 1
//
// An axis is a list of modes (size, stride), outermost first. An axis of a given size and stride has one
// mode; flattening axes that are not adjacent gives several. Modes are canonical: modes of size 1 are
// dropped, and modes that continue each other are joined. So two layouts are equal exactly if they map the
// same coordinates to the same indices.
//
// Invariants: sizes are positive; no two coordinates have the same index; sorted by stride, each stride is a
// multiple of size times stride of the mode below it, as it is for any sub-grid of a row-major grid.
//
// Thread safety: values; concurrent reads are safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace penstock {

// One axis: a map from a position in [0, size()) to an offset in the list.
class AxisLayout {
 public:
  // Equidistant positions.
  struct Mode {
    std::int64_t size = 1;    // number of positions
    std::int64_t stride = 0;  // distance of neighbors in the list
    // Compares both members.
    friend bool operator==(const Mode&, const Mode&) = default;
  };

  // One position, at offset 0.
  AxisLayout() = default;
  // One mode. Throws ValueError as the next constructor does.
  AxisLayout(std::int64_t size, std::int64_t stride) : AxisLayout(std::vector<Mode>{{size, stride}}) {}
  // Outermost mode first. Throws ValueError for a size below 1, for a stride below 1 of a mode whose size is
  // above 1, and for numbers whose product exceeds 63 bits.
  explicit AxisLayout(const std::vector<Mode>& modes);

  // Number of positions.
  std::int64_t size() const { return size_; }
  // The modes in canonical form, outermost first; empty for an axis of size 1.
  const std::vector<Mode>& modes() const { return modes_; }
  // Returns the offset of a position. Throws ValueError outside [0, size()).
  std::int64_t offset(std::int64_t position) const;

  // True if both are the same map.
  friend bool operator==(const AxisLayout&, const AxisLayout&) = default;

 private:
  std::int64_t size_ = 1;
  std::vector<Mode> modes_;
};

// Several axes: a map from coordinates to indices in the list. Immutable, except by assignment.
class MeshLayout {
 public:
  // No axes: one index, 0.
  MeshLayout() = default;
  // Row-major: the last axis has stride 1. Throws ValueError for a size below 1.
  explicit MeshLayout(const std::vector<std::int64_t>& shape);
  // One mode per axis. Throws ValueError unless there are as many strides as sizes and the axes satisfy the
  // invariants.
  MeshLayout(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides);
  // Returns the layout of these axes. Throws ValueError if they violate the invariants.
  static MeshLayout from_axes(std::vector<AxisLayout> axes);

  // Number of axes.
  int ndim() const { return static_cast<int>(axes_.size()); }
  // Number of coordinates.
  std::int64_t size() const;
  // Size of an axis. Throws ValueError for an axis outside [0, ndim()).
  std::int64_t size(int axis) const { return axis_layout(axis).size(); }
  // Size of each axis.
  std::vector<std::int64_t> shape() const;
  // The axes in order.
  const std::vector<AxisLayout>& axes() const { return axes_; }
  // One axis. Throws ValueError for an axis outside [0, ndim()).
  const AxisLayout& axis_layout(int axis) const;
  // One more than the largest index.
  std::int64_t extent() const;

  // Returns the index of a coordinate. Throws ValueError for a coordinate of the wrong length or outside the
  // shape.
  std::int64_t index(const std::vector<std::int64_t>& coordinate) const;
  // Returns the coordinate that has this index, or std::nullopt if there is none.
  std::optional<std::vector<std::int64_t>> coordinate(std::int64_t index) const;
  // Returns the indices of all coordinates, the last axis fastest.
  std::vector<std::int64_t> indices() const;
  // A list longer than the layout holds several copies of it, side by side or interleaved. Returns the first
  // index of the copy that contains `index`: MeshLayout({4}, {2}).origin(5) == 1, since 5 is in the copy 1,
  // 3, 5, 7.
  std::int64_t origin(std::int64_t index) const;

  // Returns the layout of these axes, in this order. Throws ValueError for an unknown or repeated axis.
  MeshLayout slice(const std::vector<int>& axes) const;
  // Returns a layout of one axis that runs through these axes, the last one fastest. Throws ValueError as
  // `slice` does.
  MeshLayout flatten(const std::vector<int>& axes) const;
  // The same for all axes.
  MeshLayout flatten() const;
  // The inverse: returns the layout in which `axis` is replaced by several axes of these sizes. Throws
  // ValueError if the product of the sizes differs from that of the axis, and if an axis of several modes
  // cannot be split at these sizes.
  MeshLayout unflatten(int axis, const std::vector<std::int64_t>& shape) const;
  // Whether the axes of both can be combined in one layout, without an index that occurs twice.
  bool is_disjoint(const MeshLayout& other) const;
  // Returns the axes of this layout, then those of `other`. Throws ValueError if they overlap.
  MeshLayout concatenate(const MeshLayout& other) const;

  // Returns "(2, 4):(4, 1)", "((2, 2), 3):((8, 1), 2)"; an axis of size 1 has stride 0.
  std::string to_string() const;

  // True if both have the same axes.
  friend bool operator==(const MeshLayout&, const MeshLayout&) = default;

 private:
  std::vector<AxisLayout> axes_;
};

// Identifies a mesh in a message to another process: by names and layout, not by ranks.
//
// All stages of a pipeline derive their meshes from one list of ranks, the universe. Within it, a sender and
// a receiver on different ranks have meshes with equal keys (both have "tp" with stride 1) but different
// ranks, so the receiver finds its own mesh by the key. Keys of meshes of different universes cannot be
// compared.
struct MeshKey {
  std::vector<std::string> names;    // names of the axes; empty for a mesh without names
  std::optional<MeshLayout> layout;  // std::nullopt: the mesh is found by its names alone
  // Compares names and layout.
  friend bool operator==(const MeshKey&, const MeshKey&) = default;

  // Returns "[dp, tp] (2, 4):(4, 1)".
  std::string to_string() const;
};

}  // namespace penstock

// Hash that agrees with operator==.
template <>
struct std::hash<penstock::MeshLayout> {
  // Returns the hash of a layout.
  std::size_t operator()(const penstock::MeshLayout& layout) const noexcept;
};

// Hash that agrees with operator==.
template <>
struct std::hash<penstock::MeshKey> {
  // Returns the hash of a key.
  std::size_t operator()(const penstock::MeshKey& key) const noexcept;
};
