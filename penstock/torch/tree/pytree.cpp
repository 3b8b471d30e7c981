#include "penstock/pytree.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/pytree_convert.h"
#include "penstock/torch/tree/tensor_text.h"

namespace penstock {

namespace {

// "'mask'", with quotes and backslashes escaped, so that different keys never look the same.
std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') result += '\\';
    result += c;
  }
  return result + '\'';
}

std::string quoted_keys(const std::vector<std::string>& keys) {
  std::string text;
  for (const auto& key : keys) text += (text.empty() ? "" : ", ") + in_quotes(key);
  return text.empty() ? "no keys" : (keys.size() == 1 ? "key " : "keys ") + text;
}

// The delimiters of a container's entries, as in Python: "(a,)", "[a, b]", "{'k': a}".
template <class AppendEntry>
void append_container(std::string& text, Tree::Kind kind, const std::vector<std::string>& keys,
                      std::size_t count, const AppendEntry& append_entry) {
  const char* const brackets = kind == Tree::Kind::Tuple ? "()" : kind == Tree::Kind::List ? "[]" : "{}";
  text += brackets[0];
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    if (kind == Tree::Kind::Dict) text += in_quotes(keys[i]) + ": ";
    append_entry(i);
  }
  if (kind == Tree::Kind::Tuple && count == 1) text += ',';
  text += brackets[1];
}

// A short description for an error: "a list of 3", "the int 5", "None".
std::string in_words(const Tree& tree) {
  switch (tree.kind()) {
    case Tree::Kind::None:
      return "None";
    case Tree::Kind::Tensor:
      return "a tensor";
    case Tree::Kind::Bool:
      return tree.boolean() ? "the bool true" : "the bool false";
    case Tree::Kind::Int:
      return fmt::format("the int {}", tree.integer());
    case Tree::Kind::Double:
      return fmt::format("the number {}", tree.number());
    case Tree::Kind::String:
      return fmt::format("the string {}", in_quotes(tree.text()));
    case Tree::Kind::Object:
      return fmt::format("an object of kind {}", tree.ivalue().tagKind());
    case Tree::Kind::Tuple:
      return fmt::format("a tuple of {}", tree.size());
    case Tree::Kind::List:
      return fmt::format("a list of {}", tree.size());
    case Tree::Kind::Dict:
      return fmt::format("a dictionary with {}", quoted_keys(tree.keys()));
  }
  invariant_failed("kind", __FILE__, __LINE__, "a tree kind without a description");
}

void append_text(const Tree& tree, std::string& text) {
  switch (tree.kind()) {
    case Tree::Kind::None:
      text += "None";
      return;
    case Tree::Kind::Tensor:
      text += describe_tensor(tree.tensor());
      return;
    case Tree::Kind::Bool:
      text += tree.boolean() ? "true" : "false";
      return;
    case Tree::Kind::Int:
      text += std::to_string(tree.integer());
      return;
    case Tree::Kind::Double:
      text += fmt::format("{}", tree.number());
      return;
    case Tree::Kind::String:
      text += in_quotes(tree.text());
      return;
    case Tree::Kind::Object:
      text += fmt::format("<{}>", tree.ivalue().tagKind());
      return;
    case Tree::Kind::Tuple:
    case Tree::Kind::List:
    case Tree::Kind::Dict:
      append_container(text, tree.kind(), tree.keys(), tree.size(),
                       [&](std::size_t i) { append_text(tree.entries()[i], text); });
      return;
  }
}

void append_leaves(const Tree& tree, std::vector<Tree>& leaves) {
  if (tree.is_leaf()) {
    leaves.push_back(tree);
    return;
  }
  for (const Tree& entry : tree.entries()) append_leaves(entry, leaves);
}

Tree rebuilt(const Tree& like, std::vector<Tree> entries) {
  switch (like.kind()) {
    case Tree::Kind::Tuple:
      return Tree::tuple(std::move(entries));
    case Tree::Kind::List:
      return Tree::list(std::move(entries));
    default:
      break;
  }
  std::vector<Tree::Item> items;
  items.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) items.emplace_back(like.keys()[i], std::move(entries[i]));
  return Tree::dict(std::move(items));
}

}  // namespace

// ---- Tree ----

Tree::Tree(at::Tensor tensor) {
  if (tensor.defined()) value_ = std::move(tensor);
}

Tree Tree::object(c10::IValue value) {
  Tree tree;
  tree.value_ = std::move(value);
  return tree;
}

Tree Tree::contain(Container container) {
  Tree tree;
  tree.value_ = std::make_shared<const Container>(std::move(container));
  return tree;
}

Tree Tree::tuple(std::vector<Tree> entries) { return contain({Kind::Tuple, std::move(entries), {}}); }
Tree Tree::list(std::vector<Tree> entries) { return contain({Kind::List, std::move(entries), {}}); }

Tree Tree::dict(std::vector<Item> items) {
  Container container{Kind::Dict, {}, {}};
  std::set<std::string_view> seen;
  for (const auto& [key, value] : items)
    if (!seen.insert(key).second)
      throw ValueError(
          describe("dictionary", fmt::format("the key {} twice", in_quotes(key)), "each key once"));
  for (auto& [key, value] : items) {
    container.keys.push_back(std::move(key));
    container.entries.push_back(std::move(value));
  }
  return contain(std::move(container));
}

Tree::Kind Tree::kind() const {
  if (const auto* shared = std::get_if<Shared>(&value_)) return (*shared)->kind;
  return static_cast<Kind>(value_.index());
}

void Tree::refuse(std::string_view expected) const {
  throw TypeError(describe("value of a tree", in_words(*this), expected,
                           "read it as the type it has, or pass another value"));
}

void Tree::refuse_number(const std::string& number) {
  throw ValueError(describe("number in a tree", number, "a number that fits a signed 64-bit integer",
                            "pass it as a double"));
}

const at::Tensor& Tree::tensor() const {
  if (const auto* tensor = std::get_if<at::Tensor>(&value_)) return *tensor;
  refuse("a tensor");
}
bool Tree::boolean() const {
  if (const auto* flag = std::get_if<bool>(&value_)) return *flag;
  refuse("a bool");
}
std::int64_t Tree::integer() const {
  if (const auto* number = std::get_if<std::int64_t>(&value_)) return *number;
  refuse("an int");
}
double Tree::number() const {
  if (const auto* number = std::get_if<double>(&value_)) return *number;
  if (const auto* number = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*number);
  refuse("a number");
}
const std::string& Tree::text() const {
  if (const auto* text = std::get_if<std::string>(&value_)) return *text;
  refuse("a string");
}
const c10::IValue& Tree::ivalue() const {
  if (const auto* value = std::get_if<c10::IValue>(&value_)) return *value;
  refuse("an object");
}

const std::vector<Tree>& Tree::entries() const {
  static const std::vector<Tree> kNothing;
  const auto* shared = std::get_if<Shared>(&value_);
  return shared ? (*shared)->entries : kNothing;
}

const std::vector<std::string>& Tree::keys() const {
  static const std::vector<std::string> kNothing;
  const auto* shared = std::get_if<Shared>(&value_);
  return shared ? (*shared)->keys : kNothing;
}

const Tree& Tree::operator[](std::size_t index) const {
  if (is_leaf()) refuse("a tuple or a list");
  if (index >= size())
    throw ValueError(describe("index into a tree", fmt::format("{} into {}", index, in_words(*this)),
                              fmt::format("an index below {}", size())));
  return entries()[index];
}

const Tree& Tree::operator[](std::string_view key) const {
  if (kind() != Kind::Dict) refuse(fmt::format("a dictionary with the key {}", in_quotes(key)));
  if (const Tree* entry = find(key)) return *entry;
  const std::string meant = nearest_name(key, keys());
  throw ValueError(
      describe("key of a dictionary", in_quotes(key), quoted_keys(keys()),
               meant.empty() ? std::string() : fmt::format("did you mean {}?", in_quotes(meant))));
}

const Tree* Tree::find(std::string_view key) const {
  const auto at = std::find(keys().begin(), keys().end(), key);
  return at == keys().end() ? nullptr : &entries()[static_cast<std::size_t>(at - keys().begin())];
}

std::string Tree::to_string() const {
  std::string text;
  append_text(*this, text);
  return text;
}

// ---- paths ----

std::string TreePath::to_string() const {
  if (!parent_) return std::string(name_);
  return parent_->to_string() +
         (index_ ? fmt::format("[{}]", *index_) : fmt::format("[{}]", in_quotes(name_)));
}

// ---- specs ----

TreeSpec::TreeSpec(const Tree& tree) {
  if (tree.is_leaf()) return;
  Node node{tree.kind(), tree.keys(), {}, 0};
  node.entries.reserve(tree.size());
  for (const Tree& entry : tree.entries()) {
    node.entries.emplace_back(entry);
    node.leaf_count += node.entries.back().leaf_count();
  }
  node_ = std::make_shared<const Node>(std::move(node));
}

bool TreeSpec::operator==(const TreeSpec& other) const {
  if (node_ == other.node_) return true;
  return node_ && other.node_ && node_->kind == other.node_->kind && node_->keys == other.node_->keys &&
         node_->entries == other.node_->entries;
}

std::size_t TreeSpec::hash() const { return std::hash<std::string>{}(to_string()); }

void TreeSpec::append_text(std::string& text) const {
  if (!node_) {
    text += '*';
    return;
  }
  append_container(text, node_->kind, node_->keys, node_->entries.size(),
                   [&](std::size_t i) { node_->entries[i].append_text(text); });
}

std::string TreeSpec::to_string() const {
  std::string text;
  append_text(text);
  return text;
}

TreePath TreeSpec::entry_path(const TreePath& here, std::size_t index) const {
  return node_->kind == Tree::Kind::Dict ? TreePath(here, node_->keys[index]) : TreePath(here, index);
}

void TreeSpec::append_paths(const TreePath& here, std::vector<std::string>& paths) const {
  if (!node_) {
    paths.push_back(here.to_string());
    return;
  }
  for (std::size_t i = 0; i < node_->entries.size(); ++i)
    node_->entries[i].append_paths(entry_path(here, i), paths);
}

std::vector<std::string> TreeSpec::leaf_paths(std::string_view root) const {
  std::vector<std::string> paths;
  append_paths(TreePath(root), paths);
  return paths;
}

std::string TreeSpec::describe_shape() const {
  if (!node_) return "a leaf";
  if (node_->kind == Tree::Kind::Dict) return fmt::format("a dictionary with {}", quoted_keys(node_->keys));
  return fmt::format("a {} of {}", node_->kind == Tree::Kind::Tuple ? "tuple" : "list",
                     node_->entries.size());
}

std::optional<std::string> TreeSpec::difference(const TreeSpec& actual, const TreePath& here) const {
  const bool same_level =
      node_ == actual.node_ ||
      (node_ && actual.node_ && node_->kind == actual.node_->kind && node_->keys == actual.node_->keys &&
       node_->entries.size() == actual.node_->entries.size());
  if (!same_level) return describe(here.to_string(), actual.describe_shape(), describe_shape());
  if (!node_) return std::nullopt;
  for (std::size_t i = 0; i < node_->entries.size(); ++i)
    if (auto found = node_->entries[i].difference(actual.node_->entries[i], entry_path(here, i)))
      return found;
  return std::nullopt;
}

std::optional<std::string> first_difference(const TreeSpec& expected, const TreeSpec& actual,
                                            std::string_view root) {
  return expected.difference(actual, TreePath(root));
}

Tree TreeSpec::build(std::vector<Tree>::iterator& next) const {
  if (!node_) return std::move(*next++);
  std::vector<Tree> entries;
  entries.reserve(node_->entries.size());
  for (const TreeSpec& entry : node_->entries) entries.push_back(entry.build(next));
  if (node_->kind == Tree::Kind::Tuple) return Tree::tuple(std::move(entries));
  if (node_->kind == Tree::Kind::List) return Tree::list(std::move(entries));
  std::vector<Tree::Item> items;
  items.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) items.emplace_back(node_->keys[i], std::move(entries[i]));
  return Tree::dict(std::move(items));
}

// ---- walking ----

FlatTree flatten_tree(const Tree& tree) { return {flatten_args(tree), TreeSpec(tree)}; }

Tree unflatten_tree(std::vector<Tree> leaves, const TreeSpec& spec) {
  if (leaves.size() != spec.leaf_count())
    throw ValueError(describe("unflatten_tree", fmt::format("{} leaves", leaves.size()),
                              fmt::format("{} for {}", spec.leaf_count(), spec.to_string()),
                              "pass one leaf for each * of the structure"));
  auto next = leaves.begin();
  return spec.build(next);
}

Tree map_tree(const Tree& tree, const std::function<Tree(const Tree&)>& change) {
  if (tree.is_leaf()) return change(tree);
  std::vector<Tree> entries;
  entries.reserve(tree.size());
  for (const Tree& entry : tree.entries()) entries.push_back(map_tree(entry, change));
  return rebuilt(tree, std::move(entries));
}

Tree map_tree_tensors(const Tree& tree, const std::function<at::Tensor(const at::Tensor&)>& change) {
  return map_tree(tree,
                  [&](const Tree& leaf) { return leaf.is_tensor() ? Tree(change(leaf.tensor())) : leaf; });
}

std::vector<at::Tensor> tensors_of(const Tree& tree) {
  std::vector<at::Tensor> tensors;
  for (const Tree& leaf : flatten_args(tree))
    if (leaf.is_tensor()) tensors.push_back(leaf.tensor());
  return tensors;
}

std::vector<Tree> flatten_args(const Tree& args) {
  std::vector<Tree> leaves;
  append_leaves(args, leaves);
  return leaves;
}

DetachedArgs flatten_args(const Tree& args, DetachTag) {
  auto [leaves, spec] = flatten_tree(args);
  for (Tree& leaf : leaves)
    if (leaf.is_tensor()) leaf = leaf.tensor().detach().requires_grad_(leaf.tensor().requires_grad());
  return {unflatten_tree(leaves, spec), leaves};
}

DetachedArgs flatten_args_detach(const Tree& args) { return flatten_args(args, kDetach); }

void detail::refuse_tree(const Tree& tree, const TreePath& path, std::string_view expected) {
  throw TypeError(describe(path.to_string(), in_words(tree), expected, "pass a value of that type here"));
}

}  // namespace penstock
