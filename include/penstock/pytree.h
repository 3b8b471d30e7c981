// Nested arguments and results: tuples, lists and dictionaries whose leaves are tensors and plain values.
//
//   at::Tensor mask = torch::ones({4});
//   Tree args = Tree::tuple({x, Tree::dict({{"mask", mask}, {"scale", 0.5}})});
//   auto [leaves, spec] = flatten_tree(args);   // x, mask, 0.5 and "(*, {'mask': *, 'scale': *})"
//   Tree again = unflatten_tree(leaves, spec);
//   Tree doubled = map_tree_tensors(args, [](const at::Tensor& t) { return t * 2; });
//   at::Tensor same = args[1]["mask"].tensor();
//
// Order is part of the structure: a dictionary keeps the order in which it was built, and leaves are returned
// in that order. None is a leaf; an undefined tensor becomes None.
//
// Using a value as another kind is a TypeError; a missing index or key is a ValueError. Errors name the
// position by its path from the root: "args[1]['mask']". Constructors convert from std::tuple, std::vector
// and std::optional; pytree_convert.h converts to them, and from and to c10::IValue.
//
// Thread safety: trees and specs are immutable and may be read by any thread. Copies are cheap, because
// containers are shared.
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

namespace penstock {

class Tree;
// Types from which a Tree can be constructed.
template <class T>
concept TreeConvertible = std::constructible_from<Tree, const T&>;

// A leaf or a container of trees.
class Tree {
 public:
  // What a tree is. Tuple, List and Dict are containers, all others are leaves.
  enum class Kind : std::uint8_t {
    None,    // no value
    Tensor,  // a defined tensor
    Bool,    // true or false
    Int,     // a signed 64-bit integer
    Double,  // a floating-point number
    String,  // a text
    Object,  // any other c10::IValue
    Tuple,   // entries by position
    List,    // entries by position
    Dict     // entries by position and key
  };
  // A key and its value in a dictionary.
  using Item = std::pair<std::string, Tree>;

  // None.
  Tree() = default;
  // None.
  Tree(std::nullopt_t) {}
  // A tensor; None if it is undefined.
  Tree(at::Tensor tensor);
  // A string.
  Tree(std::string text) : value_(std::move(text)) {}
  // A string.
  Tree(std::string_view text) : value_(std::string(text)) {}
  // A string.
  Tree(const char* text) : value_(std::string(text)) {}
  // A Bool or an Int. Throws ValueError for a number that does not fit in a signed 64-bit integer.
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
  // A Double.
  Tree(double number) : value_(number) {}
  // A Double.
  Tree(float number) : value_(static_cast<double>(number)) {}
  // Returns a leaf that is passed through unchanged: a device, a generator, an object of a custom class.
  static Tree object(c10::IValue value);

  // Returns a tuple.
  static Tree tuple(std::vector<Tree> entries);
  // Returns a list.
  static Tree list(std::vector<Tree> entries);
  // Returns a dictionary. Throws ValueError for a duplicate key.
  static Tree dict(std::vector<Item> items);

  // A list.
  template <TreeConvertible T>
  Tree(const std::vector<T>& values) : Tree(list(std::vector<Tree>(values.begin(), values.end()))) {}
  // A list of tensors.
  Tree(at::TensorList tensors) : Tree(list(std::vector<Tree>(tensors.begin(), tensors.end()))) {}
  // A tuple.
  template <TreeConvertible... Ts>
  Tree(const std::tuple<Ts...>& values)
      : Tree(std::apply([](const Ts&... each) { return tuple(std::vector<Tree>{Tree(each)...}); }, values)) {}
  // The value; None for an empty optional.
  template <TreeConvertible T>
  Tree(const std::optional<T>& value) : Tree(value ? Tree(*value) : Tree()) {}

  // What this is.
  Kind kind() const;
  // Whether this is not a container.
  bool is_leaf() const { return !std::holds_alternative<Shared>(value_); }
  // Whether this is None.
  bool is_none() const { return kind() == Kind::None; }
  // Whether this is a tensor.
  bool is_tensor() const { return kind() == Kind::Tensor; }

  // The tensor. Throws TypeError if this is not a Tensor.
  const at::Tensor& tensor() const;
  // The truth value. Throws TypeError if this is not a Bool.
  bool boolean() const;
  // The integer. Throws TypeError if this is not an Int.
  std::int64_t integer() const;
  // The number. Throws TypeError if this is neither a Double nor an Int.
  double number() const;
  // The text. Throws TypeError if this is not a String.
  const std::string& text() const;
  // The object. Throws TypeError if this is not an Object.
  const c10::IValue& ivalue() const;

  // Number of entries of a container; 0 for a leaf.
  std::size_t size() const { return entries().size(); }
  // Entries of a container in order; empty for a leaf.
  const std::vector<Tree>& entries() const;
  // Keys of a dictionary in the order of its entries; empty for all other trees.
  const std::vector<std::string>& keys() const;
  // The entry at a position. Throws ValueError if it is out of range, TypeError for a leaf.
  const Tree& operator[](std::size_t index) const;
  // The value of a key. Throws ValueError if the key is missing, TypeError if this is not a dictionary.
  const Tree& operator[](std::string_view key) const;
  // Returns the value of a key, or null if the key is missing.
  const Tree* find(std::string_view key) const;

  // Returns a text such as "(float32[2, 3], {'mask': None, 'scale': 0.5})".
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

  // In the order of Kind; the last is for all containers.
  std::variant<std::monostate, at::Tensor, bool, std::int64_t, double, std::string, c10::IValue, Shared>
      value_;
};

// A position in a tree, built on the stack while a tree is traversed; the text is made on demand. Refers to
// its parent and to the given text, which must outlive it.
class TreePath {
 public:
  // The root, called `root`.
  explicit TreePath(std::string_view root) : name_(root) {}
  // An entry of a tuple or list.
  TreePath(const TreePath& parent, std::size_t index) : parent_(&parent), index_(index) {}
  // An entry of a dictionary.
  TreePath(const TreePath& parent, std::string_view key) : parent_(&parent), name_(key) {}

  // Returns a text such as "args[1]['mask']".
  std::string to_string() const;

 private:
  const TreePath* parent_ = nullptr;
  std::optional<std::size_t> index_;
  std::string_view name_;  // of the root, or the key
};

// The structure of a tree without its leaves. Equal specs have the same number of leaves at the same
// positions; the kinds of leaves are not part of a spec.
class TreeSpec {
 public:
  // A single leaf.
  TreeSpec() = default;
  // The structure of a tree.
  explicit TreeSpec(const Tree& tree);

  // Number of leaves.
  std::size_t leaf_count() const { return node_ ? node_->leaf_count : 1; }
  // Whether both are the same structure.
  bool operator==(const TreeSpec& other) const;
  // A hash; equal for equal specs.
  std::size_t hash() const;

  // Returns a text such as "(*, {'mask': *}, [*, *])". Two specs are equal if and only if their texts are.
  std::string to_string() const;
  // Returns the path of each leaf, in order: "args[0]", "args[1]['mask']", ...
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

// A tree as its leaves and its structure.
struct FlatTree {
  std::vector<Tree> leaves;  // in order
  TreeSpec spec;             // where they are
};
// Returns the leaves and the structure of a tree.
FlatTree flatten_tree(const Tree& tree);

// The inverse of flatten_tree. Entries of `leaves` may themselves be containers. Throws ValueError if their
// number is not spec.leaf_count().
Tree unflatten_tree(std::vector<Tree> leaves, const TreeSpec& spec);

// Returns a description of the first difference between two structures, with its path, or std::nullopt if
// they are equal.
std::optional<std::string> first_difference(const TreeSpec& expected, const TreeSpec& actual,
                                            std::string_view root = "args");

// Returns the tree with every leaf replaced by `change(leaf)`.
Tree map_tree(const Tree& tree, const std::function<Tree(const Tree& leaf)>& change);
// Returns the tree with every tensor replaced by `change(tensor)`; other leaves are unchanged.
Tree map_tree_tensors(const Tree& tree, const std::function<at::Tensor(const at::Tensor&)>& change);
// Returns the tensors among the leaves, in order.
std::vector<at::Tensor> tensors_of(const Tree& tree);

// ---- arguments of a stage ----

// Type of kDetach.
struct DetachTag {};
// Requests tensors that are detached from their autograd graph: flatten_args(args, kDetach).
inline constexpr DetachTag kDetach{};

// Returns the leaves, in order.
std::vector<Tree> flatten_args(const Tree& args);

// Arguments whose tensors are detached from their graphs.
struct DetachedArgs {
  Tree args;               // with the structure of the original
  std::vector<Tree> flat;  // the leaves of `args`, in order: the same tensors
};
// Detaches every tensor from its graph and keeps its requires_grad, so that each is a new leaf of autograd;
// other leaves are unchanged. Called as flatten_args(args, kDetach).
DetachedArgs flatten_args(const Tree& args, DetachTag);

// As flatten_args(args, kDetach), under the name that PyTorch uses.
[[deprecated("use flatten_args(args, kDetach)")]] DetachedArgs flatten_args_detach(const Tree& args);

}  // namespace penstock

// Hash of a TreeSpec, for unordered containers.
template <>
struct std::hash<penstock::TreeSpec> {
  // Returns spec.hash().
  std::size_t operator()(const penstock::TreeSpec& spec) const { return spec.hash(); }
};
