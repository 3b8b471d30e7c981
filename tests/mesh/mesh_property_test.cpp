// Laws of layouts and meshes on random grids, checked by enumeration.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "penstock/device_mesh.h"
#include "penstock/errors.h"
#include "penstock/mesh_layout.h"
#include "tests/mesh/generate.h"

namespace penstock {
namespace mesh_property_test {

using test::number;
using test::random_shape;
using Numbers = std::vector<std::int64_t>;

// Axes 0 .. ndim - 1, some of them, in order.
std::vector<int> random_axes(int ndim) {
  std::vector<int> axes;
  for (int axis = 0; axis < ndim; ++axis)
    if (*rc::gen::arbitrary<bool>()) axes.push_back(axis);
  if (axes.empty()) axes.push_back(number(0, ndim - 1));
  return axes;
}

std::vector<std::string> names_of(std::size_t ndim) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < ndim; ++i) names.push_back("axis" + std::to_string(i));
  return names;
}

// Row-major digits of a number.
Numbers digits(std::int64_t number, const Numbers& shape) {
  Numbers result(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    result[i] = number % shape[i];
    number /= shape[i];
  }
  return result;
}

RC_GTEST_PROP(MeshLayoutLaws, IndexAndCoordinateAreInverse, ()) {
  const Numbers shape = random_shape();
  std::vector<int> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i-- > 1;) std::swap(order[i], order[number<std::size_t>(0, i)]);
  const MeshLayout layout = MeshLayout(shape).slice(order);
  const Numbers indices = layout.indices();
  RC_ASSERT(std::set<std::int64_t>(indices.begin(), indices.end()).size() ==
            static_cast<std::size_t>(layout.size()));
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const Numbers coordinate = digits(static_cast<std::int64_t>(i), layout.shape());
    RC_ASSERT(layout.index(coordinate) == indices[i]);
    RC_ASSERT(layout.coordinate(indices[i]) == coordinate);
    RC_ASSERT(layout.flatten().index({static_cast<std::int64_t>(i)}) == indices[i]);
  }
  RC_ASSERT(layout.coordinate(layout.extent()) == std::nullopt);
}

RC_GTEST_PROP(MeshLayoutLaws, FlattenAndUnflatten, ()) {
  const MeshLayout whole(random_shape());
  const std::vector<int> axes = random_axes(whole.ndim());
  const MeshLayout part = whole.slice(axes);
  const MeshLayout flat = whole.flatten(axes);
  RC_ASSERT(flat.ndim() == 1);
  RC_ASSERT(flat.indices() == part.indices());
  RC_ASSERT(flat.unflatten(0, part.shape()) == part);
  RC_ASSERT(std::hash<MeshLayout>{}(flat.unflatten(0, part.shape())) == std::hash<MeshLayout>{}(part));
}

// Layouts are equal if and only if their maps are equal.
RC_GTEST_PROP(MeshLayoutLaws, EqualityIsEqualMaps, ()) {
  const auto random_layout = [] {
    MeshLayout layout(random_shape(3, 3));
    layout = layout.slice(random_axes(layout.ndim()));
    return *rc::gen::arbitrary<bool>() ? layout.flatten() : layout;
  };
  const MeshLayout a = random_layout(), b = random_layout();
  RC_ASSERT((a == b) == (a.shape() == b.shape() && a.indices() == b.indices()));
}

// The copies of a part fill the whole, each index once.
RC_GTEST_PROP(MeshLayoutLaws, OriginsPartitionTheUniverse, ()) {
  const MeshLayout whole(random_shape());
  const MeshLayout part = whole.slice(random_axes(whole.ndim()));
  std::map<std::int64_t, std::set<std::int64_t>> copies;
  for (std::int64_t index = 0; index < whole.size(); ++index) copies[part.origin(index)].insert(index);
  for (const auto& [origin, members] : copies) {
    std::set<std::int64_t> expected;
    for (const std::int64_t index : part.indices()) expected.insert(origin + index);
    RC_ASSERT(members == expected);
  }
}

// A slice matches its definition: the ranks with the own rank's coordinates in all axes that are left out.
RC_GTEST_PROP(DeviceMeshLaws, SliceFlattenConcatenate, ()) {
  const Numbers shape = random_shape();
  const std::int64_t size = MeshLayout(shape).size();
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), number(0, 2));
  for (std::size_t i = ranks.size(); i-- > 1;) std::swap(ranks[i], ranks[number<std::size_t>(0, i)]);
  const auto own = static_cast<std::size_t>(number<std::int64_t>(0, size - 1));
  const DeviceMesh mesh("cpu", shape, ranks, names_of(shape.size()), ranks[own]);
  const std::vector<int> axes = random_axes(mesh.ndim());

  const Numbers own_coordinate = digits(static_cast<std::int64_t>(own), shape);
  std::vector<int> expected;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Numbers coordinate = digits(static_cast<std::int64_t>(i), shape);
    bool agrees = true;
    for (int axis = 0; axis < mesh.ndim(); ++axis)
      if (std::find(axes.begin(), axes.end(), axis) == axes.end())
        agrees = agrees &&
                 coordinate[static_cast<std::size_t>(axis)] == own_coordinate[static_cast<std::size_t>(axis)];
    if (agrees) expected.push_back(ranks[i]);
  }
  std::vector<std::string> names;
  Numbers part_coordinate;
  std::vector<DeviceMesh> single;
  for (const int axis : axes) {
    names.push_back(mesh.names()[static_cast<std::size_t>(axis)]);
    part_coordinate.push_back(own_coordinate[static_cast<std::size_t>(axis)]);
    single.push_back(mesh[names.back()]);
    RC_ASSERT(single.back().ranks() == mesh.rank_list(axis));
  }
  const DeviceMesh part = mesh.slice(names);
  RC_ASSERT(part.ranks() == expected);
  RC_ASSERT(part.coordinate() == part_coordinate);
  RC_ASSERT(DeviceMesh::concatenate(single) == part);
  const DeviceMesh flat = part.flatten({}, "flat");
  RC_ASSERT(flat.ranks() == expected);
  RC_ASSERT(mesh["flat"] == flat);
  RC_ASSERT(flat.unflatten(0, part.shape(), names) == part);
  RC_ASSERT(mesh.find(part.key()) == part);
  for (const int rank : expected) {
    RC_ASSERT(part.as_rank(rank).ranks() == expected);
    RC_ASSERT(part.coordinate(rank) == part.as_rank(rank).coordinate());
  }
  for (int axis = 0; axis < part.ndim(); ++axis) {
    std::multiset<int> covered;
    for (const auto& list : part.rank_lists(axis)) covered.insert(list.begin(), list.end());
    RC_ASSERT(covered == std::multiset<int>(expected.begin(), expected.end()));
  }
}

}  // namespace mesh_property_test
}  // namespace penstock
