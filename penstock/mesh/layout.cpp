#include "penstock/mesh_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/base/hash.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

using Mode = AxisLayout::Mode;

constexpr const char* kTooBig = "use sizes and strides whose product fits in 63 bits";

std::int64_t product_of(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result))
    throw ValueError(describe("mesh layout", fmt::format("{} times {}", a, b), "", kTooBig));
  return result;
}

std::int64_t sum_of(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result))
    throw ValueError(describe("mesh layout", fmt::format("{} plus {}", a, b), "", kTooBig));
  return result;
}

// Returns whether no index occurs twice and the modes nest, see the header. Sorts its argument.
bool nests(std::vector<Mode>& modes) {
  std::sort(modes.begin(), modes.end(), [](const Mode& a, const Mode& b) { return a.stride < b.stride; });
  for (std::size_t i = 1; i < modes.size(); ++i) {
    std::int64_t end = 0;  // of the mode below
    if (__builtin_mul_overflow(modes[i - 1].size, modes[i - 1].stride, &end) || modes[i].stride % end != 0)
      return false;
  }
  return true;
}

std::vector<Mode> all_modes(const std::vector<AxisLayout>& axes) {
  std::vector<Mode> modes;
  for (const AxisLayout& axis : axes) modes.insert(modes.end(), axis.modes().begin(), axis.modes().end());
  return modes;
}

std::vector<AxisLayout> single_mode_axes(const std::vector<std::int64_t>& shape,
                                         const std::vector<std::int64_t>& strides) {
  if (shape.size() != strides.size())
    throw ValueError(describe("mesh layout",
                              fmt::format("{} sizes and {} strides", shape.size(), strides.size()),
                              "as many strides as sizes"));
  std::vector<AxisLayout> axes;
  for (std::size_t i = 0; i < shape.size(); ++i) axes.emplace_back(shape[i], strides[i]);
  return axes;
}

std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& shape) {
  for (const std::int64_t size : shape)
    if (size < 1)
      throw ValueError(
          describe("mesh layout", fmt::format("an axis of size {}", size), "a size of at least 1"));
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = product_of(strides[i], shape[i]);
  return strides;
}

std::string axis_text(const AxisLayout& axis, bool strides) {
  if (axis.modes().empty()) return strides ? "0" : "1";
  std::string text;
  for (const Mode& mode : axis.modes())
    text += fmt::format("{}{}", text.empty() ? "" : ", ", strides ? mode.stride : mode.size);
  return axis.modes().size() == 1 ? text : "(" + text + ")";
}

}  // namespace

AxisLayout::AxisLayout(const std::vector<Mode>& modes) {
  for (const Mode& mode : modes) {
    if (mode.size < 1 || (mode.size > 1 && mode.stride < 1))
      throw ValueError(describe("mesh layout",
                                fmt::format("an axis of size {} with stride {}", mode.size, mode.stride),
                                "a size of at least 1 and a stride of at least 1"));
    if (mode.size == 1) continue;
    size_ = product_of(size_, mode.size);
    product_of(mode.size, mode.stride);  // throws if the end of the axis overflows
    if (!modes_.empty() && modes_.back().stride == mode.size * mode.stride)
      modes_.back() = {modes_.back().size * mode.size, mode.stride};
    else
      modes_.push_back(mode);
  }
}

std::int64_t AxisLayout::offset(std::int64_t position) const {
  if (position < 0 || position >= size_)
    throw ValueError(
        describe("position on a mesh axis", fmt::format("{}", position), fmt::format("0 to {}", size_ - 1)));
  std::int64_t offset = 0;
  for (auto mode = modes_.rbegin(); mode != modes_.rend(); ++mode) {
    offset += position % mode->size * mode->stride;
    position /= mode->size;
  }
  return offset;
}

MeshLayout::MeshLayout(const std::vector<std::int64_t>& shape) : MeshLayout(shape, row_major(shape)) {}

MeshLayout::MeshLayout(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides)
    : MeshLayout(from_axes(single_mode_axes(shape, strides))) {}

MeshLayout MeshLayout::from_axes(std::vector<AxisLayout> axes) {
  MeshLayout layout;
  layout.axes_ = std::move(axes);
  std::vector<Mode> modes = all_modes(layout.axes_);
  if (!nests(modes))
    throw ValueError(describe("mesh layout", layout.to_string(), "axes that do not overlap",
                              "make every stride a multiple of size times stride of the axes inside it"));
  std::int64_t last = 1;
  for (const Mode& mode : modes) last = sum_of(last, product_of(mode.size - 1, mode.stride));
  return layout;
}

std::int64_t MeshLayout::size() const {
  std::int64_t size = 1;  // no overflow: disjoint axes cannot have more indices than extent()
  for (const AxisLayout& axis : axes_) size *= axis.size();
  return size;
}

std::vector<std::int64_t> MeshLayout::shape() const {
  std::vector<std::int64_t> shape;
  shape.reserve(axes_.size());
  for (const AxisLayout& axis : axes_) shape.push_back(axis.size());
  return shape;
}

const AxisLayout& MeshLayout::axis_layout(int axis) const {
  if (axis < 0 || axis >= ndim())
    throw ValueError(
        describe("mesh axis", fmt::format("{}", axis),
                 ndim() == 0 ? std::string("a layout with axes") : fmt::format("0 to {}", ndim() - 1)));
  return axes_[static_cast<std::size_t>(axis)];
}

std::int64_t MeshLayout::extent() const {
  std::int64_t extent = 1;
  for (const AxisLayout& axis : axes_) extent += axis.offset(axis.size() - 1);
  return extent;
}

std::int64_t MeshLayout::index(const std::vector<std::int64_t>& coordinate) const {
  if (coordinate.size() != axes_.size())
    throw ValueError(describe("mesh coordinate", fmt::format("{} numbers", coordinate.size()),
                              fmt::format("{}, one per axis", axes_.size())));
  std::int64_t index = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i) index += axes_[i].offset(coordinate[i]);
  return index;
}

std::optional<std::vector<std::int64_t>> MeshLayout::coordinate(std::int64_t index) const {
  if (index < 0 || origin(index) != 0) return std::nullopt;
  std::vector<std::int64_t> coordinate;
  for (const AxisLayout& axis : axes_) {
    std::int64_t position = 0;
    for (const Mode& mode : axis.modes()) position = position * mode.size + index / mode.stride % mode.size;
    coordinate.push_back(position);
  }
  return coordinate;
}

std::vector<std::int64_t> MeshLayout::indices() const {
  std::vector<std::int64_t> indices = {0};
  for (const AxisLayout& axis : axes_) {
    std::vector<std::int64_t> longer;
    longer.reserve(indices.size() * static_cast<std::size_t>(axis.size()));
    for (const std::int64_t index : indices)
      for (std::int64_t position = 0; position < axis.size(); ++position)
        longer.push_back(index + axis.offset(position));
    indices = std::move(longer);
  }
  return indices;
}

std::int64_t MeshLayout::origin(std::int64_t index) const {
  std::int64_t own =
      0;  // the digits of index that belong to this layout; the modes nest, so the digits are independent
  for (const AxisLayout& axis : axes_)
    for (const Mode& mode : axis.modes()) own += index / mode.stride % mode.size * mode.stride;
  return index - own;
}

MeshLayout MeshLayout::slice(const std::vector<int>& axes) const {
  std::vector<AxisLayout> chosen;
  std::vector<int> seen;
  for (const int axis : axes) {
    chosen.push_back(axis_layout(axis));
    if (std::find(seen.begin(), seen.end(), axis) != seen.end())
      throw ValueError(
          describe("slice of a mesh layout", fmt::format("axis {} twice", axis), "each axis once"));
    seen.push_back(axis);
  }
  return from_axes(std::move(chosen));
}

MeshLayout MeshLayout::flatten(const std::vector<int>& axes) const { return slice(axes).flatten(); }

MeshLayout MeshLayout::flatten() const { return from_axes({AxisLayout(all_modes(axes_))}); }

MeshLayout MeshLayout::unflatten(int axis, const std::vector<std::int64_t>& shape) const {
  const AxisLayout& whole = axis_layout(axis);
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (size < 1)
      throw ValueError(describe("unflatten", fmt::format("a size of {}", size), "sizes of at least 1"));
    product = product_of(product, size);
  }
  if (product != whole.size())
    throw ValueError(describe("unflatten", fmt::format("({}), {} positions", fmt::join(shape, ", "), product),
                              fmt::format("a product of {}, the size of axis {}", whole.size(), axis),
                              "change the sizes"));
  // From the innermost size outwards, each takes what it needs from the remaining modes.
  std::vector<Mode> left = whole.modes();
  std::vector<AxisLayout> parts(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    std::vector<Mode> taken;
    for (std::int64_t wanted = shape[i]; wanted > 1;) {
      Mode& mode = left.back();
      const std::int64_t take = std::min(wanted, mode.size);
      if (wanted % take != 0 || mode.size % take != 0)
        throw ValueError(describe(
            "unflatten",
            fmt::format("({}) of an axis laid out as {}", fmt::join(shape, ", "), slice({axis}).to_string()),
            "sizes that split between the axes it was flattened from", "unflatten to those axes first"));
      taken.insert(taken.begin(), {take, mode.stride});
      wanted /= take;
      mode = {mode.size / take, mode.stride * take};
      if (mode.size == 1) left.pop_back();
    }
    parts[i] = AxisLayout(taken);
  }
  std::vector<AxisLayout> axes(axes_.begin(), axes_.begin() + axis);
  axes.insert(axes.end(), parts.begin(), parts.end());
  axes.insert(axes.end(), axes_.begin() + axis + 1, axes_.end());
  return from_axes(std::move(axes));
}

bool MeshLayout::is_disjoint(const MeshLayout& other) const {
  std::vector<Mode> modes = all_modes(axes_);
  const std::vector<Mode> more = all_modes(other.axes_);
  modes.insert(modes.end(), more.begin(), more.end());
  return nests(modes);
}

MeshLayout MeshLayout::concatenate(const MeshLayout& other) const {
  std::vector<AxisLayout> axes = axes_;
  axes.insert(axes.end(), other.axes_.begin(), other.axes_.end());
  return from_axes(std::move(axes));
}

std::string MeshLayout::to_string() const {
  std::string sizes, strides;
  for (const AxisLayout& axis : axes_) {
    const char* comma = &axis == axes_.data() ? "" : ", ";
    sizes += comma + axis_text(axis, false);
    strides += comma + axis_text(axis, true);
  }
  return fmt::format("({}):({})", sizes, strides);
}

}  // namespace penstock

std::size_t std::hash<penstock::MeshLayout>::operator()(const penstock::MeshLayout& layout) const noexcept {
  penstock::HashBuilder hash;
  hash.add(layout.ndim());
  for (const auto& axis : layout.axes()) {
    hash.add(axis.modes().size());
    for (const auto& mode : axis.modes()) hash.add(mode.size).add(mode.stride);
  }
  return hash.value();
}
