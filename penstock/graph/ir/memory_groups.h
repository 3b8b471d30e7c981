// Which values of a graph share memory when it runs, and how much memory that is.
//
//   const MemoryGroups groups(graph);
//   groups.of(a) == groups.of(b)          // they share memory
//   groups.bytes(groups.of(a))            // of all values in it
//
// More than storages: `_unsafe_view` returns the memory of its argument, which its schema does not say.
// Groups are numbered from 0. Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

class MemoryGroups {
 public:
  // `joined`: further pairs of values that share memory, for a reason that the graph does not show.
  explicit MemoryGroups(const Graph& graph, const std::vector<std::pair<ValueId, ValueId>>& joined = {});

  std::size_t count() const { return bytes_.size(); }
  std::size_t of(ValueId value) const { return group_[index_of(value)]; }
  std::int64_t bytes(std::size_t group) const { return bytes_[group]; }
  // The memory belongs to an input or a constant of the graph.
  bool is_given(std::size_t group) const { return given_[group] != 0; }

 private:
  std::vector<std::size_t> group_;   // by value
  std::vector<std::int64_t> bytes_;  // by group
  std::vector<char> given_;          // by group
};

// Bytes from the start of its memory to the end of its last element.
std::int64_t extent_bytes(const Geometry& geometry);

// Whether a node only makes other views of the memory of one argument.
bool only_views(const Node& node);

}  // namespace penstock::graph
