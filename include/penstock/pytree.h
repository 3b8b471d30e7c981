// Nested arguments and results: tuples, lists and dictionaries whose leaves are tensors and plain values.
//
//   Tree args = Tree::tuple({x, Tree::dict({{"mask", mask}, {"scale", 0.5}})});
//   auto [leaves, spec] = flatten_tree(args);          // x, mask, 0.5 and "(*, {'mask': *, 'scale': *})"
//   Tree doubled = map_tree_tensors(args, [](const at::Tensor& t) { return t * 2; });
//   at::Tensor m = args[1]["mask"].tensor();
//
// A Tree is an immutable value: copies are cheap (containers are shared), so any thread may read one. Order
// is part of the structure: a dictionary keeps the order in which it was built, and leaves come out in that
// order. An undefined tensor is C++'s spelling of nothing, so it becomes the leaf None. None is a leaf.
//
// A wrong place is named by its path from the root: "args[1]['mask']". Misuse of a value is a TypeError, a
// missing index or key a ValueError. Conversions to and from std::tuple, std::vector, std::optional, std::map
// and c10::IValue: here (constructors) and in pytree_convert.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/torch/tree/detach_tag.h"

namespace penstock {

class Tree;
template <class T>
concept TreeConvertible = std::constructible_from<Tree, const T&>;

class Tree {
 public:
  enum class Kind : std::uint8_t { None, Tensor, Bool, Int, Double, String, Object, Tuple, List, Dict };
  using Item = std::pair<std::string, Tree>;

  // Leaves.
  Tree() = default;  // None
  Tree(std::nullopt_t) {}
  Tree(at::Tensor tensor);
  Tree(std::string text) : value_(std::move(text)) {}
  Tree(std::string_view text) : value_(std::string(text)) {}
  Tree(const char* text) : value_(std::string(text)) {}
  template <std::integral T>
  Tree(T number) {
    static_assert(!std::same_as<T, char>,
                  "a single character is neither a number nor a text; write \"c\" or static_cast<int>('c')");
    if constexpr (std::same_as<T, bool>) {
      value_ = number;
    } else {
      if (!std::in_range<std::int64_t>(number)) refuse_number(std::to_string(number));
      value_ = static_cast<std::int64_t>(number);
    }
  }
  Tree(double number) : value_(number) {}
  Tree(float number) : value_(static_cast<double>(number)) {}
  // A leaf that passes through untouched: a device, a generator, an object of a custom class.
  static Tree object(c10::IValue value);

  // Containers. A dictionary with a key twice is a ValueError.
  static Tree tuple(std::vector<Tree> entries);
  static Tree list(std::vector<Tree> entries);
  static Tree dict(std::vector<Item> items);

  // What a C++ caller has at hand: a vector is a list, a std::tuple is a tuple, an empty optional is None.
  template <TreeConvertible T>
  Tree(const std::vector<T>& values) : Tree(list(std::vector<Tree>(values.begin(), values.end()))) {}
  Tree(at::TensorList tensors) : Tree(list(std::vector<Tree>(tensors.begin(), tensors.end()))) {}
  template <TreeConvertible... Ts>
  Tree(const std::tuple<Ts...>& values)
      : Tree(std::apply([](const Ts&... each) { return tuple(std::vector<Tree>{Tree(each)...}); }, values)) {}
  template <TreeConvertible T>
  Tree(const std::optional<T>& value) : Tree(value ? Tree(*value) : Tree()) {}

  Kind kind() const;
  bool is_leaf() const { return !std::holds_alternative<Shared>(value_); }
  bool is_none() const { return kind() == Kind::None; }
  bool is_tensor() const { return kind() == Kind::Tensor; }

  // The value of a leaf of that kind; another kind is a TypeError. `number` also reads an Int, as C++ would.
  const at::Tensor& tensor() const;
  bool boolean() const;
  std::int64_t integer() const;
  double number() const;
  const std::string& text() const;
  const c10::IValue& ivalue() const;  // of an Object

  // Containers: entries in order, keys of a dictionary in the same order. A leaf has no entries.
  std::size_t size() const { return entries().size(); }
  const std::vector<Tree>& entries() const;
  const std::vector<std::string>& keys() const;
  const Tree& operator[](std::size_t index) const;
  const Tree& operator[](std::string_view key) const;
  const Tree* find(std::string_view key) const;  // null when the key is missing

  // "(float32[2, 3], {'mask': None, 'scale': 0.5})"
  std::string to_string() const;

 private:
  struct Container {
    Kind kind = Kind::Tuple;
    std::vector<Tree> entries;
    std::vector<std::string> keys;  // of a Dict, one for each entry; otherwise empty
  };
  using Shared = std::shared_ptr<const Container>;

  static Tree contain(Container container);
  [[noreturn]] static void refuse_number(const std::string& number);
  [[noreturn]] void refuse(std::string_view expected) const;

  // In the order of Kind; the last stands for all containers.
  std::variant<std::monostate, at::Tensor, bool, std::int64_t, double, std::string, c10::IValue, Shared>
      value_;
};

// A place in a tree. Built on the stack while walking down; text is made only when somebody asks.
class TreePath {
 public:
  explicit TreePath(std::string_view root) : name_(root) {}
  TreePath(const TreePath& parent, std::size_t index) : parent_(&parent), index_(index) {}
  TreePath(const TreePath& parent, std::string_view key) : parent_(&parent), name_(key) {}

  std::string to_string() const;

 private:
  const TreePath* parent_ = nullptr;
  std::optional<std::size_t> index_;
  std::string_view name_;  // of the root, or the key
};

// A tree without its leaves. Equal specs put equally many leaves at the same places. Kinds of leaves are no
// part of it.
class TreeSpec {
 public:
  TreeSpec() = default;  // one leaf
  explicit TreeSpec(const Tree& tree);

  std::size_t leaf_count() const { return node_ ? node_->leaf_count : 1; }
  bool operator==(const TreeSpec& other) const;
  std::size_t hash() const;

  // "(*, {'mask': *}, [*, *])". Two specs are equal exactly when their texts are.
  std::string to_string() const;
  // Where each leaf is, in order: "args[0]", "args[1]['mask']", ...
  std::vector<std::string> leaf_paths(std::string_view root = "args") const;

 private:
  friend Tree unflatten_tree(std::vector<Tree> leaves, const TreeSpec& spec);
  friend std::optional<std::string> first_difference(const TreeSpec&, const TreeSpec&, std::string_view);
  struct Node {
    Tree::Kind kind = Tree::Kind::Tuple;
    std::vector<std::string> keys;
    std::vector<TreeSpec> entries;
    std::size_t leaf_count = 0;
  };
  Tree build(std::vector<Tree>::iterator& next) const;
  void append_text(std::string& text) const;
  void append_paths(const TreePath& here, std::vector<std::string>& paths) const;
  std::optional<std::string> difference(const TreeSpec& actual, const TreePath& here) const;
  TreePath entry_path(const TreePath& here, std::size_t index) const;
  std::string describe_shape() const;

  std::shared_ptr<const Node> node_;  // null: a leaf
};

struct FlatTree {
  std::vector<Tree> leaves;
  TreeSpec spec;
};
FlatTree flatten_tree(const Tree& tree);

// The inverse. Another number of leaves than the spec has is a ValueError. A "leaf" may itself be a
// container.
Tree unflatten_tree(std::vector<Tree> leaves, const TreeSpec& spec);

// Where two structures first differ, in words with the path; nothing when they are equal.
std::optional<std::string> first_difference(const TreeSpec& expected, const TreeSpec& actual,
                                            std::string_view root = "args");

Tree map_tree(const Tree& tree, const std::function<Tree(const Tree& leaf)>& change);
Tree map_tree_tensors(const Tree& tree,
                      const std::function<at::Tensor(const at::Tensor&)>& change);  // other leaves stay
std::vector<at::Tensor> tensors_of(const Tree& tree);                               // in order of leaves

// ---- arguments of a stage ----

// The leaves, in order.
std::vector<Tree> flatten_args(const Tree& args);

// With every tensor detached from its graph and keeping its requires_grad, so that each is a fresh leaf of
// autograd; other leaves pass through. `flat` and the leaves of `args` are the same tensors.
struct DetachedArgs {
  Tree args;
  std::vector<Tree> flat;
};
DetachedArgs flatten_args(const Tree& args, DetachTag);

[[deprecated("use flatten_args(args, kDetach)")]] DetachedArgs flatten_args_detach(const Tree& args);

}  // namespace penstock

template <>
struct std::hash<penstock::TreeSpec> {
  std::size_t operator()(const penstock::TreeSpec& spec) const { return spec.hash(); }
};
