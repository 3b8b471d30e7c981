#include "penstock/device_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "penstock/base/describe.h"
#include "penstock/base/hash.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

constexpr std::int64_t kRanksInText = 64;  // larger meshes are abridged

std::string quoted(const std::vector<std::string>& names) {
  return fmt::format("\"{}\"", fmt::join(names, "\", \""));
}

std::vector<int> checked_ranks(std::vector<int> ranks) {
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0)
      throw ValueError(describe("ranks of a mesh", fmt::format("rank {}", rank), "ranks of at least 0"));
    if (!seen.insert(rank).second)
      throw ValueError(describe("ranks of a mesh", fmt::format("rank {} twice", rank), "each rank once",
                                "list every rank once"));
  }
  return ranks;
}

void check_names(const std::vector<std::string>& names, int ndim) {
  if (static_cast<int>(names.size()) != ndim && !names.empty())
    throw ValueError(describe("axis names", fmt::format("{} ({})", names.size(), quoted(names)),
                              fmt::format("{}, one per axis", ndim), "name every axis or none"));
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (name.empty()) throw ValueError(describe("axis names", "an empty one", "", "name every axis or none"));
    if (!seen.insert(name).second)
      throw ValueError(describe("axis names", fmt::format("\"{}\" twice", name), "distinct names",
                                "rename one of the axes"));
  }
}

std::string checked_device_type(const std::string& type) {
  const bool letters = std::all_of(type.begin(), type.end(),
                                   [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); });
  if (type.empty() || !letters)
    throw ValueError(describe("device type of a mesh", fmt::format("\"{}\"", type),
                              "a device type such as cpu or cuda",
                              "leave out the device index; each rank selects its own"));
  return type;
}

[[noreturn]] void unknown_axis(const std::string& name, const std::vector<std::string>& own,
                               const std::vector<std::string>& flattened, bool root) {
  if (own.empty())
    throw ValueError(describe("mesh axis", fmt::format("\"{}\"", name), "a mesh with names",
                              "name the axes when the mesh is made"));
  std::vector<std::string> known = own;
  known.insert(known.end(), flattened.begin(), flattened.end());
  const std::string nearest = nearest_name(name, known);
  std::string remedy = nearest.empty() ? "" : fmt::format("did you mean \"{}\"?", nearest);
  if (!root && nearest.empty()) remedy = "flattened axes are only known to the root mesh, see root()";
  throw ValueError(
      describe("mesh axis", fmt::format("\"{}\"", name), fmt::format("one of {}", quoted(known)), remedy));
}

// Ranks nested by axis: "[[0,1],[2,3]]".
std::string nested(const std::vector<int>& ranks, const std::vector<std::int64_t>& shape, std::size_t axis,
                   std::size_t& next) {
  if (axis == shape.size()) return fmt::format("{}", ranks[next++]);
  std::string text;
  for (std::int64_t i = 0; i < shape[axis]; ++i)
    text += (i == 0 ? "" : ",") + nested(ranks, shape, axis + 1, next);
  return "[" + text + "]";
}

}  // namespace

struct DeviceMesh::Root {
  Root(std::string type, MeshLayout root_layout, std::vector<int> root_ranks,
       std::vector<std::string> root_names)
      : device_type(std::move(type)),
        layout(std::move(root_layout)),
        names(std::move(root_names)),
        ranks(std::move(root_ranks)) {
    for (std::size_t i = 0; i < ranks.size(); ++i) index_of.emplace(ranks[i], static_cast<std::int64_t>(i));
  }

  const std::string device_type;
  const MeshLayout layout;
  const std::vector<std::string> names;
  const std::vector<int> ranks;
  std::unordered_map<int, std::int64_t> index_of;

  std::mutex mutex;
  std::map<std::string, AxisLayout> flattened;  // guarded by mutex
};

DeviceMesh::DeviceMesh(const std::string& device_type, const std::vector<std::int64_t>& shape,
                       std::vector<int> ranks, std::vector<std::string> names, int this_rank)
    : layout_(shape), this_rank_(this_rank) {
  if (shape.empty())
    throw ValueError(describe("shape of a mesh", "no axes", "at least one", "use {1} for a single rank"));
  if (layout_.size() != static_cast<std::int64_t>(ranks.size()))
    throw ValueError(
        describe("mesh", fmt::format("{} ranks for the shape {}", ranks.size(), fmt::join(shape, " x ")),
                 fmt::format("{} ranks", layout_.size()), "change the shape or the list of ranks"));
  check_names(names, layout_.ndim());
  if (this_rank < 0)
    throw ValueError(describe("own rank of a mesh", fmt::format("{}", this_rank), "a rank of at least 0"));
  names_ = names;
  root_ = std::make_shared<Root>(checked_device_type(device_type), layout_, checked_ranks(std::move(ranks)),
                                 std::move(names));
}

DeviceMesh::DeviceMesh(std::shared_ptr<Root> root, MeshLayout layout, std::vector<std::string> names,
                       int this_rank)
    : root_(std::move(root)), layout_(std::move(layout)), names_(std::move(names)), this_rank_(this_rank) {
  const auto own = root_->index_of.find(this_rank);
  if (own != root_->index_of.end()) {
    origin_ = layout_.origin(own->second);
  } else if (layout_.size() != static_cast<std::int64_t>(root_->ranks.size())) {
    throw ValueError(describe("part of a mesh", fmt::format("rank {}", this_rank),
                              fmt::format("one of the mesh's ranks {}", format_list(root_->ranks)),
                              "check contains(rank) first; a rank outside the mesh has no part"));
  }
}

const std::string& DeviceMesh::device_type() const { return root_->device_type; }
const std::vector<int>& DeviceMesh::universe() const { return root_->ranks; }
bool DeviceMesh::is_root() const { return names_ == root_->names && layout_ == root_->layout; }
DeviceMesh DeviceMesh::root() const { return DeviceMesh(root_, root_->layout, root_->names, this_rank_); }
DeviceMesh DeviceMesh::as_rank(int rank) const { return DeviceMesh(root_, layout_, names_, rank); }

int DeviceMesh::axis(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) unknown_axis(std::string(name), names_, {}, is_root());
  return static_cast<int>(found - names_.begin());
}

std::vector<int> DeviceMesh::ranks() const {
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(size()));
  for (const std::int64_t index : layout_.indices())
    ranks.push_back(root_->ranks[static_cast<std::size_t>(origin_ + index)]);
  return ranks;
}

std::optional<std::vector<std::int64_t>> DeviceMesh::coordinate(int rank) const {
  const auto found = root_->index_of.find(rank);
  if (found == root_->index_of.end()) return std::nullopt;
  return layout_.coordinate(found->second - origin_);
}

int DeviceMesh::axis_rank(int axis, int rank) const {
  layout_.axis_layout(axis);
  const auto where = coordinate(rank);
  if (!where)
    throw ValueError(describe("position on a mesh axis", fmt::format("rank {}", rank),
                              fmt::format("one of the mesh's ranks {}", format_list(ranks())),
                              "check contains(rank) first"));
  return static_cast<int>((*where)[static_cast<std::size_t>(axis)]);
}

std::vector<int> DeviceMesh::rank_list(int axis, int rank) const {
  const int position = axis_rank(axis, rank);
  const AxisLayout& along = layout_.axis_layout(axis);
  const std::int64_t first = root_->index_of.at(rank) - along.offset(position);
  std::vector<int> list;
  for (std::int64_t i = 0; i < along.size(); ++i)
    list.push_back(root_->ranks[static_cast<std::size_t>(first + along.offset(i))]);
  return list;
}

std::vector<std::vector<int>> DeviceMesh::rank_lists(int axis) const {
  layout_.axis_layout(axis);
  std::vector<int> others;
  for (int other = 0; other < ndim(); ++other)
    if (other != axis) others.push_back(other);
  std::vector<std::vector<int>> lists;
  for (const std::int64_t index : layout_.slice(others).indices())
    lists.push_back(rank_list(axis, root_->ranks[static_cast<std::size_t>(origin_ + index)]));
  return lists;
}

std::vector<AxisLayout> DeviceMesh::axes_named(const std::vector<std::string>& names) const {
  std::map<std::string, AxisLayout> flattened;
  if (is_root()) {
    std::lock_guard lock(root_->mutex);
    flattened = root_->flattened;
  }
  std::vector<AxisLayout> axes;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (!seen.insert(name).second)
      throw ValueError(describe("slice of a mesh", fmt::format("axis \"{}\" twice", name), "each axis once",
                                "name it once"));
    if (const auto own = std::find(names_.begin(), names_.end(), name); own != names_.end()) {
      axes.push_back(layout_.axes()[static_cast<std::size_t>(own - names_.begin())]);
    } else if (const auto other = flattened.find(name); other != flattened.end()) {
      axes.push_back(other->second);
    } else {
      std::vector<std::string> known;
      for (const auto& [known_name, axis] : flattened) known.push_back(known_name);
      unknown_axis(name, names_, known, is_root());
    }
  }
  return axes;
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  if (names == names_ && !names.empty()) return *this;
  if (names.empty())
    throw ValueError(describe("slice of a mesh", "no axes", fmt::format("some of {}", quoted(names_)),
                              "name at least one axis"));
  const std::vector<AxisLayout> axes = axes_named(names);
  const auto refuse = [&](const char* what, const char* remedy) {
    throw ValueError(describe("slice of a mesh", fmt::format("{}, {}", quoted(names), what),
                              fmt::format("axes in the order {}", quoted(names_)), remedy));
  };
  // Order is checked by position for axes of this mesh, and by strides if flattened names are among them.
  // Strides also reveal axes that overlap.
  const auto place = [&](const std::string& name) { return std::find(names_.begin(), names_.end(), name); };
  const bool all_own = std::all_of(names.begin(), names.end(),
                                   [&](const std::string& name) { return place(name) != names_.end(); });
  if (all_own) {
    // An axis of size 1 may appear anywhere.
    std::vector<std::string> ordered;
    for (std::size_t i = 0; i < names.size(); ++i)
      if (axes[i].size() > 1) ordered.push_back(names[i]);
    if (!std::is_sorted(ordered.begin(), ordered.end(),
                        [&](const auto& a, const auto& b) { return place(a) < place(b); }))
      refuse("not in the mesh's order", "reorder the names, or concatenate() slices to get another order");
  } else if (names.size() > 1) {
    MeshLayout whole;
    for (const AxisLayout& axis : axes) {
      const MeshLayout next = MeshLayout::from_axes({axis});
      if (!whole.is_disjoint(next))
        refuse("of which some share an axis", "use each axis once, flattened or not");
      whole = whole.concatenate(next);
    }
    const MeshLayout flat = whole.flatten();
    const auto& modes = flat.axes()[0].modes();
    if (!std::is_sorted(modes.begin(), modes.end(),
                        [](const auto& a, const auto& b) { return a.stride > b.stride; }))
      refuse("not in the mesh's order",
             "put a flattened name where its axes are, with no other axis between them");
  }
  return DeviceMesh(root_, MeshLayout::from_axes(axes), names, this_rank_);
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string_view> names) const {
  return slice(std::vector<std::string>(names.begin(), names.end()));
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& axes, const std::string& wanted_name) const {
  if (!axes.empty() && axes != names_) return slice(axes).flatten({}, wanted_name);
  if (names_.empty())
    throw ValueError(describe("flatten", "a mesh without names", "a mesh with names",
                              "name the axes when the mesh is made"));
  const std::string name = wanted_name.empty() ? fmt::format("{}", fmt::join(names_, "_")) : wanted_name;
  if (ndim() == 1 && name == names_[0]) return *this;
  const auto taken = [&](const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (taken(names_) || taken(root_->names))
    throw ValueError(describe("name of a flattened axis", fmt::format("\"{}\"", name),
                              "a name that no axis has", "choose another name"));
  MeshLayout flat = layout_.flatten();
  {
    std::lock_guard lock(root_->mutex);
    const auto [entry, made] = root_->flattened.emplace(name, flat.axes()[0]);
    if (!made && !(entry->second == flat.axes()[0]))
      throw ValueError(describe("name of a flattened axis",
                                fmt::format("\"{}\" for {}", name, quoted(names_)),
                                "a name not used for other flattened axes", "choose another name"));
  }
  return DeviceMesh(root_, std::move(flat), {name}, this_rank_);
}

DeviceMesh DeviceMesh::unflatten(int axis, const std::vector<std::int64_t>& shape,
                                 const std::vector<std::string>& names) const {
  layout_.axis_layout(axis);
  if (names.size() != (names_.empty() ? 0 : shape.size()))
    throw ValueError(describe("unflatten", fmt::format("{} names for {} sizes", names.size(), shape.size()),
                              names_.empty() ? "no names, since the mesh has none" : "one name per size"));
  if (shape.empty()) throw ValueError(describe("unflatten", "no sizes", "at least one"));
  std::vector<std::string> all_names = names_;
  if (!names_.empty()) {
    all_names.erase(all_names.begin() + axis);
    all_names.insert(all_names.begin() + axis, names.begin(), names.end());
  }
  MeshLayout layout = layout_.unflatten(axis, shape);
  check_names(all_names, layout.ndim());
  return DeviceMesh(root_, std::move(layout), std::move(all_names), this_rank_);
}

DeviceMesh DeviceMesh::unflatten(std::string_view name, const std::vector<std::int64_t>& shape,
                                 const std::vector<std::string>& names) const {
  return unflatten(axis(name), shape, names);
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  if (meshes.empty()) throw ValueError(describe("concatenate", "no meshes", "at least one"));
  const DeviceMesh& first = meshes.front();
  MeshLayout layout;
  std::vector<std::string> names;
  for (const DeviceMesh& mesh : meshes) {
    const auto refuse = [&](const char* expected, const char* remedy) {
      throw ValueError(describe("concatenate", fmt::format("{} and {}", first.to_string(), mesh.to_string()),
                                expected, remedy));
    };
    if (mesh.universe() != first.universe() || mesh.device_type() != first.device_type())
      refuse("meshes with the same root", "slice both from the same root");
    if (mesh.this_rank_ != first.this_rank_) refuse("meshes seen from the same rank", "use as_rank()");
    if (mesh.names_.empty() != first.names_.empty())
      refuse("meshes that all have names or all have none", "name the axes of both");
    if (!layout.is_disjoint(mesh.layout_))
      refuse("axes that do not overlap", "use each axis of the root once");
    layout = layout.concatenate(mesh.layout_);
    names.insert(names.end(), mesh.names_.begin(), mesh.names_.end());
  }
  check_names(names, layout.ndim());
  return DeviceMesh(first.root_, std::move(layout), std::move(names), first.this_rank_);
}

DeviceMesh DeviceMesh::find(const MeshKey& key) const {
  if (!key.layout) return root().slice(key.names);
  check_names(key.names, key.layout->ndim());
  // Copies of a layout of this universe fill the universe; any other layout comes from a different one.
  const auto total = static_cast<std::int64_t>(root_->ranks.size());
  bool fits = total % key.layout->size() == 0;
  for (const AxisLayout& axis : key.layout->axes())
    for (const AxisLayout::Mode& mode : axis.modes()) fits = fits && total % (mode.size * mode.stride) == 0;
  if (!fits)
    throw ValueError(describe("mesh of a record", key.to_string(),
                              fmt::format("a part of the {} ranks {}", total, format_list(root_->ranks)),
                              "derive the meshes of all stages from one mesh"));
  return DeviceMesh(root_, *key.layout, key.names, this_rank_);
}

std::string DeviceMesh::to_string() const {
  std::string axes;
  const std::vector<std::int64_t> sizes = shape();
  for (std::size_t i = 0; i < sizes.size(); ++i)
    axes += fmt::format("{}{}{}", i == 0 ? "" : " x ", names_.empty() ? "" : names_[i] + "=", sizes[i]);
  const std::vector<int> all = ranks();
  std::size_t next = 0;
  const std::string list = size() <= kRanksInText ? nested(all, sizes, 0, next) : format_list(all);
  return fmt::format("DeviceMesh({}, {}, ranks {})", device_type(), axes, list);
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  return a.this_rank_ == b.this_rank_ && a.names_ == b.names_ && a.layout_ == b.layout_ &&
         (a.root_ == b.root_ || (a.universe() == b.universe() && a.device_type() == b.device_type()));
}

DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<std::int64_t>& shape,
                            const std::vector<std::string>& names, int rank, int world_size) {
  if (rank < 0 || rank >= world_size)
    throw ValueError(
        describe("own rank of a mesh", fmt::format("{}", rank), fmt::format("0 to {}", world_size - 1)));
  const std::int64_t size = MeshLayout(shape).size();
  if (size > world_size)
    throw ValueError(describe("mesh", fmt::format("{}, {} ranks", fmt::join(shape, " x "), size),
                              fmt::format("at most the {} ranks of the world", world_size),
                              "start more ranks or shrink an axis"));
  std::vector<int> ranks(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  return DeviceMesh(device_type, shape, std::move(ranks), names, rank);
}

std::string MeshKey::to_string() const {
  return fmt::format("[{}]{}", fmt::join(names, ", "), layout ? " " + layout->to_string() : "");
}

}  // namespace penstock

std::size_t std::hash<penstock::MeshKey>::operator()(const penstock::MeshKey& key) const noexcept {
  penstock::HashBuilder hash;
  hash.add(key.names.size());
  for (const std::string& name : key.names) hash.add(name);
  hash.add(key.layout.has_value());
  if (key.layout) hash.add(*key.layout);
  return hash.value();
}

std::size_t std::hash<penstock::DeviceMesh>::operator()(const penstock::DeviceMesh& mesh) const noexcept {
  penstock::HashBuilder hash;
  hash.add(mesh.layout_).add(mesh.this_rank_).add(mesh.device_type()).add(mesh.names_.size());
  for (const std::string& name : mesh.names_) hash.add(name);
  hash.add(mesh.universe().size());
  for (const int rank : mesh.universe()) hash.add(rank);
  return hash.value();
}
