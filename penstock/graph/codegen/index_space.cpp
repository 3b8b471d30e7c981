#include "penstock/graph/codegen/index_space.h"

#include <algorithm>

namespace penstock::graph {

IndexSpace::Axis IndexSpace::add(std::int64_t size) {
  axes_.push_back({.size = size});
  return static_cast<Axis>(axes_.size() - 1);
}

IndexSpace::Dim IndexSpace::dim(std::int64_t size) {
  if (size == 1) return {};
  return {add(size)};
}

void IndexSpace::append_leaves(Axis axis, Dim& leaves) const {
  const AxisState& state = axes_[static_cast<std::size_t>(axis)];
  if (state.same >= 0) {
    append_leaves(state.same, leaves);
  } else if (state.inner >= 0) {
    append_leaves(state.outer, leaves);
    append_leaves(state.inner, leaves);
  } else {
    leaves.push_back(axis);
  }
}

IndexSpace::Dim IndexSpace::leaves(const Dim& dim) const {
  Dim leaves;
  for (const Axis axis : dim) append_leaves(axis, leaves);
  return leaves;
}

std::int64_t IndexSpace::size_of(const Dim& dim) const {
  std::int64_t size = 1;
  for (const Axis axis : dim) size *= axes_[static_cast<std::size_t>(axis)].size;
  return size;
}

bool IndexSpace::unify(const Dim& first, const Dim& second) {
  for (;;) {
    // Splitting an axis changes what both consist of.
    const Dim a = leaves(first), b = leaves(second);
    std::size_t i = a.size(), j = b.size();
    while (i > 0 && j > 0 && a[i - 1] == b[j - 1]) --i, --j;
    if (i == 0 && j == 0) return true;
    if (i == 0 || j == 0) return false;
    Axis larger = a[i - 1], smaller = b[j - 1];
    if (size(larger) < size(smaller)) std::swap(larger, smaller);
    if (size(larger) == size(smaller)) {
      axes_[static_cast<std::size_t>(larger)].same = smaller;
      continue;
    }
    if (size(larger) % size(smaller) != 0) return false;
    const Axis outer = add(size(larger) / size(smaller));
    axes_[static_cast<std::size_t>(larger)].outer = outer;
    axes_[static_cast<std::size_t>(larger)].inner = smaller;
  }
}

std::optional<std::vector<IndexSpace::Dim>> IndexSpace::viewed(const std::vector<Dim>& dims,
                                                               const std::vector<std::int64_t>& sizes) {
  Dim rest = leaves(joined(dims));
  std::vector<Dim> made(sizes.size());
  for (std::size_t d = sizes.size(); d-- > 0;) {
    std::int64_t missing = sizes[d];
    while (missing > 1) {
      if (rest.empty()) return std::nullopt;
      const Axis axis = rest.back();
      if (missing % size(axis) == 0) {
        rest.pop_back();
        made[d].insert(made[d].begin(), axis);
        missing /= size(axis);
        continue;
      }
      if (size(axis) % missing != 0) return std::nullopt;
      const Axis outer = add(size(axis) / missing), inner = add(missing);
      axes_[static_cast<std::size_t>(axis)].outer = outer;
      axes_[static_cast<std::size_t>(axis)].inner = inner;
      rest.back() = outer;
      made[d].insert(made[d].begin(), inner);
      missing = 1;
    }
  }
  if (!rest.empty()) return std::nullopt;
  return made;
}

IndexSpace::Dim joined(const std::vector<IndexSpace::Dim>& dims) {
  IndexSpace::Dim all;
  for (const IndexSpace::Dim& dim : dims) all.insert(all.end(), dim.begin(), dim.end());
  return all;
}

}  // namespace penstock::graph
