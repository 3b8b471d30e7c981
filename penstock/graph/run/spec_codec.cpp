#include "penstock/graph/run/spec_codec.h"

#include <utility>

namespace penstock::graph {
namespace {

constexpr int kDeepestTree = 64;

// A leaf is None.
enum class NodeOfSpec : std::uint8_t { Leaf, Tuple, List, Dict };

void write_tree(ByteWriter& out, const Tree& tree) {
  const auto kind = [&](NodeOfSpec which) { out.number(static_cast<std::uint8_t>(which)); };
  if (tree.is_leaf()) return kind(NodeOfSpec::Leaf);
  kind(tree.kind() == Tree::Kind::Tuple  ? NodeOfSpec::Tuple
       : tree.kind() == Tree::Kind::List ? NodeOfSpec::List
                                         : NodeOfSpec::Dict);
  out.count(tree.size());
  for (const std::string& key : tree.keys()) out.text(key);
  for (const Tree& entry : tree.entries()) write_tree(out, entry);
}

Tree read_tree(ByteReader& in, int depth) {
  if (depth > kDeepestTree) in.fail("a structure that is nested too deeply");
  const auto kind = in.choice(NodeOfSpec::Dict);
  if (kind == NodeOfSpec::Leaf) return {};
  const std::size_t count = in.count();
  std::vector<std::string> keys;
  if (kind == NodeOfSpec::Dict)
    for (std::size_t i = 0; i < count; ++i) keys.push_back(in.text());
  std::vector<Tree> entries;
  for (std::size_t i = 0; i < count; ++i) entries.push_back(read_tree(in, depth + 1));
  if (kind == NodeOfSpec::Tuple) return Tree::tuple(std::move(entries));
  if (kind == NodeOfSpec::List) return Tree::list(std::move(entries));
  std::vector<Tree::Item> items;
  for (std::size_t i = 0; i < count; ++i) items.emplace_back(std::move(keys[i]), std::move(entries[i]));
  return Tree::dict(std::move(items));
}

}  // namespace

Bytes encode_specs(const std::vector<TreeSpec>& specs) {
  ByteWriter out;
  out.count(specs.size());
  for (const TreeSpec& spec : specs)
    write_tree(out, unflatten_tree(std::vector<Tree>(spec.leaf_count()), spec));
  return std::move(out.bytes);
}

std::vector<TreeSpec> decode_specs(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes, "structures of results");
  std::vector<TreeSpec> specs;
  for (std::size_t left = in.count(); left > 0; --left) specs.emplace_back(read_tree(in, 0));
  if (in.remaining() != 0) in.fail("trailing bytes");
  return specs;
}

}  // namespace penstock::graph
