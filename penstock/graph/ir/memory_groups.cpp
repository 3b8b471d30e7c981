#include "penstock/graph/ir/memory_groups.h"

#include <algorithm>
#include <numeric>

#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

bool is_unsafe_view(const Node& node) { return node.op.operator_name().name == "aten::_unsafe_view"; }

}  // namespace

bool only_views(const Node& node) { return traits_of(node.op).pure_view || is_unsafe_view(node); }

std::int64_t extent_bytes(const Geometry& geometry) {
  std::int64_t last = geometry.storage_offset;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i) {
    if (geometry.sizes[i] == 0) return 0;
    last += (geometry.sizes[i] - 1) * geometry.strides[i];
  }
  return (last + 1) * static_cast<std::int64_t>(c10::elementSize(geometry.dtype));
}

MemoryGroups::MemoryGroups(const Graph& graph, const std::vector<std::pair<ValueId, ValueId>>& joined)
    : group_(graph.values.size(), 0) {
  std::vector<std::size_t> leader(static_cast<std::size_t>(graph.storages));  // by storage
  std::iota(leader.begin(), leader.end(), std::size_t{0});
  const auto find = [&](StorageId storage) {
    std::size_t at = index_of(storage);
    while (leader[at] != at) at = leader[at] = leader[leader[at]];
    return at;
  };
  for (const Node& node : graph.nodes)
    if (is_unsafe_view(node) && node.arguments[0].value() != kNoValue && node.results[0].value() != kNoValue)
      leader[find(graph[node.results[0].value()].storage)] = find(graph[node.arguments[0].value()].storage);
  for (const auto& [a, b] : joined) leader[find(graph[a].storage)] = find(graph[b].storage);
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::vector<std::size_t> number(leader.size(), kNone);
  for (std::size_t i = 0; i < graph.values.size(); ++i) {
    std::size_t& group = number[find(graph.values[i].storage)];
    if (group == kNone) {
      group = bytes_.size();
      bytes_.push_back(0);
    }
    group_[i] = group;
    bytes_[group] = std::max(bytes_[group], extent_bytes(graph.values[i].geometry));
  }
  given_.assign(bytes_.size(), 0);
  for (const Placeholder& input : graph.inputs) given_[of(input.value)] = 1;
  for (const ConstantTensor& constant : graph.constants) given_[of(constant.value)] = 1;
}

}  // namespace penstock::graph
