// Where the ranks of a mesh stand in a list of ranks: a size and a stride per axis, and no ranks.
//
//   MeshLayout grid({2, 4});          // (2, 4):(4, 1)
//   grid.index({1, 2});               // 6: the seventh rank of the list
//   grid.slice({1});                  // (4):(1), the inner axis alone
//   grid.flatten({0, 1});             // (8):(1), one stride is enough
//   MeshLayout({2, 2, 2}).flatten({0, 2});  // ((2, 2)):((4, 1)), one axis whose steps are 1, 3, 1
//
// An axis is a list of modes (size, stride), outermost first. Axes that a user gives have one mode; merging
// axes that are not neighbours gives several. Modes are kept canonical: modes of size 1 are dropped and modes
// that continue each other are joined. So equal values are equal maps from coordinates to indices, and the
// other way round.
//
// Invariants: sizes are positive, no two coordinates have the same index, and sorted by stride each mode
// begins at a multiple of where the one below it ends; the layout of any rows and columns of a grid is like
// that. Immutable values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace penstock {

// One axis: a map from a position 0 .. size() - 1 to an offset in the list.
class AxisLayout {
 public:
  struct Mode {
    std::int64_t size = 1;
    std::int64_t stride = 0;
    friend bool operator==(const Mode&, const Mode&) = default;
  };

  AxisLayout() = default;  // one position, at offset 0
  AxisLayout(std::int64_t size, std::int64_t stride) : AxisLayout(std::vector<Mode>{{size, stride}}) {}
  // Outermost mode first. Throws ValueError for a size below 1, a stride below 1 (of a size above 1) or
  // numbers too big.
  explicit AxisLayout(const std::vector<Mode>& modes);

  std::int64_t size() const { return size_; }
  // Canonical; empty for an axis of size 1.
  const std::vector<Mode>& modes() const { return modes_; }
  // Throws ValueError outside 0 .. size() - 1.
  std::int64_t offset(std::int64_t position) const;

  friend bool operator==(const AxisLayout&, const AxisLayout&) = default;

 private:
  std::int64_t size_ = 1;
  std::vector<Mode> modes_;
};

class MeshLayout {
 public:
  MeshLayout() = default;  // no axes: one index, 0
  // Row-major: the last axis has stride 1.
  explicit MeshLayout(const std::vector<std::int64_t>& shape);
  MeshLayout(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides);
  static MeshLayout from_axes(std::vector<AxisLayout> axes);
  // All of these throw ValueError for axes that break the invariants.

  int ndim() const { return static_cast<int>(axes_.size()); }
  std::int64_t size() const;
  std::int64_t size(int axis) const { return axis_layout(axis).size(); }
  std::vector<std::int64_t> shape() const;
  const std::vector<AxisLayout>& axes() const { return axes_; }
  // Throws ValueError for an axis outside 0 .. ndim() - 1.
  const AxisLayout& axis_layout(int axis) const;
  // One more than the largest index.
  std::int64_t extent() const;

  // Throws ValueError for a coordinate of the wrong length or outside the shape.
  std::int64_t index(const std::vector<std::int64_t>& coordinate) const;
  // Nothing when no coordinate has this index.
  std::optional<std::vector<std::int64_t>> coordinate(std::int64_t index) const;
  // Of all coordinates, the last axis fastest.
  std::vector<std::int64_t> indices() const;
  // A list longer than the layout holds several copies of it, side by side or interleaved. This is index 0 of
  // the copy that holds `index`: MeshLayout({4}, {2}).origin(5) == 1, since 5 stands in 1, 3, 5, 7.
  std::int64_t origin(std::int64_t index) const;

  // These axes in this order. Throws ValueError for an unknown or repeated axis.
  MeshLayout slice(const std::vector<int>& axes) const;
  // One axis that runs through these axes, the last one fastest.
  MeshLayout flatten(const std::vector<int>& axes) const;
  MeshLayout flatten() const;
  // The inverse: `axis` becomes several axes. Throws ValueError when the product differs, and when an axis of
  // several modes does not come apart there.
  MeshLayout unflatten(int axis, const std::vector<std::int64_t>& shape) const;
  // Whether the axes of both can stand together in one layout: no index twice.
  bool is_disjoint(const MeshLayout& other) const;
  // The axes of this one, then those of `other`. Throws ValueError when they overlap.
  MeshLayout concatenate(const MeshLayout& other) const;

  // "(2, 4):(4, 1)", "((2, 2), 3):((8, 1), 2)"; an axis of size 1 has stride 0.
  std::string to_string() const;

  friend bool operator==(const MeshLayout&, const MeshLayout&) = default;

 private:
  std::vector<AxisLayout> axes_;
};

// What a record that goes to another process says about a mesh: names and layout, never ranks.
//
// All stages of a pipeline derive their meshes from one list of ranks, the universe. Within it a sender and a
// receiver on different ranks have meshes of equal key (both hold "tp" with stride 1), each with its own
// ranks; so the receiver finds its own mesh by the key. Between meshes of different universes keys mean
// nothing.
struct MeshKey {
  std::vector<std::string> names;    // empty for a mesh without names
  std::optional<MeshLayout> layout;  // nothing: the names alone must do
  friend bool operator==(const MeshKey&, const MeshKey&) = default;

  // "[dp, tp] (2, 4):(4, 1)".
  std::string to_string() const;
};

}  // namespace penstock

template <>
struct std::hash<penstock::MeshLayout> {
  std::size_t operator()(const penstock::MeshLayout& layout) const noexcept;
};

template <>
struct std::hash<penstock::MeshKey> {
  std::size_t operator()(const penstock::MeshKey& key) const noexcept;
};
