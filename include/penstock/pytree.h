// Nested arguments and results: tuples, lists and dictionaries whose leaves are tensors and plain values.
//
//   at::Tensor mask = torch::ones({2});
//   Tree args = Tree::tuple({x, Tree::dict({{"mask", mask}, {"scale", 0.5}})});
//   auto [leaves, spec] = flatten_tree(args);          // x, mask, 0.5 and "(*, {'mask': *, 'scale': *})"
//   Tree doubled = map_tree_tensors(args, [](const at::Tensor& t) { return t * 2; });
//   at::Tensor m = args[1]["mask"].tensor();
//
// A Tree is an immutable value: copies are cheap (containers are shared), and any thread may read one.
// Order is part of the structure: a dictionary keeps the order in which it was built, and leaves are listed
// in that order. An undefined tensor becomes the leaf None. None is a leaf.
//
// Errors name the position by its path from the root: "args[1]['mask']". Using a value as another kind throws
// TypeError, a missing index or key ValueError. Conversions from std::tuple, std::vector, std::optional: the
// constructors; to them, and from and to c10::IValue: pytree_convert.h.
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

// A type from which a Tree can be constructed.
template <class T>
concept TreeConvertible = std::constructible_from<Tree, const T&>;

// A leaf (a tensor, a number, a string, None, an object) or a container of trees.
class Tree {
 public:
  // What a tree is; the last three are containers.
  enum class Kind : std::uint8_t {
    None,    // nothing; an undefined tensor
    Tensor,  // a defined tensor
    Bool,    // a bool
    Int,     // a 64-bit integer
    Double,  // a floating point number
    String,  // a text
    Object,  // any other value
    Tuple,   // entries by index
    List,    // entries by index
    Dict     // entries by key, in order
  };
  // A key of a dictionary and its value.
  using Item = std::pair<std::string, Tree>;

  Tree() = default;                                                // None
  Tree(std::nullopt_t) {}                                          // None
  Tree(at::Tensor tensor);                                         // a Tensor, or None if it is undefined
  Tree(std::string text) : value_(std::move(text)) {}              // a String
  Tree(std::string_view text) : value_(std::string(text)) {}       // a String
  Tree(const char* text) : value_(std::string(text)) {}            // a String
  // A Bool or an Int. Throws ValueError for a number beyond 64 bits.
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
  Tree(double number) : value_(number) {}                          // a Double
  Tree(float number) : value_(static_cast<double>(number)) {}      // a Double
  // A leaf that is passed on unchanged: a device, a generator, an object of a custom class.
  static Tree object(c10::IValue value);

  // A tuple of these entries.
  static Tree tuple(std::vector<Tree> entries);
  // A list of these entries.
  static Tree list(std::vector<Tree> entries);
  // A dictionary of these items, in this order. Throws ValueError for a key that occurs twice.
  static Tree dict(std::vector<Item> items);

  // A vector is a list.
  template <TreeConvertible T>
  Tree(const std::vector<T>& values) : Tree(list(std::vector<Tree>(values.begin(), values.end()))) {}
  // A list of tensors.
  Tree(at::TensorList tensors) : Tree(list(std::vector<Tree>(tensors.begin(), tensors.end()))) {}
  // A std::tuple is a tuple.
  template <TreeConvertible... Ts>
  Tree(const std::tuple<Ts...>& values)
      : Tree(std::apply([](const Ts&... each) { return tuple(std::vector<Tree>{Tree(each)...}); }, values)) {}
  // An empty optional is None.
  template <TreeConvertible T>
  Tree(const std::optional<T>& value) : Tree(value ? Tree(*value) : Tree()) {}

  Kind kind() const;                                                        // what the tree is
  bool is_leaf() const { return !std::holds_alternative<Shared>(value_); }  // not a container
  bool is_none() const { return kind() == Kind::None; }                     // the leaf None
  bool is_tensor() const { return kind() == Kind::Tensor; }                 // a tensor

  // The value of a Tensor. Like the next five: throws TypeError for another kind.
  const at::Tensor& tensor() const;
  bool boolean() const;               // of a Bool
  std::int64_t integer() const;       // of an Int
  double number() const;              // of a Double or an Int
  const std::string& text() const;    // of a String
  const c10::IValue& ivalue() const;  // of an Object

  // The number of entries; 0 for a leaf.
  std::size_t size() const { return entries().size(); }
  // The entries of a container, in order; none for a leaf.
  const std::vector<Tree>& entries() const;
  // The keys of a dictionary, in the order of entries(); none for other kinds.
  const std::vector<std::string>& keys() const;
  // An entry by index. Throws ValueError if there is none.
  const Tree& operator[](std::size_t index) const;
  // An entry of a dictionary by key. Throws ValueError if there is none.
  const Tree& operator[](std::string_view key) const;
  // An entry of a dictionary by key; null if there is none.
  const Tree* find(std::string_view key) const;

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

// A position in a tree, for errors. Built on the stack while descending; refers to its parent.
class TreePath {
 public:
  explicit TreePath(std::string_view root) : name_(root) {}                                  // the root
  TreePath(const TreePath& parent, std::size_t index) : parent_(&parent), index_(index) {}  // an entry
  TreePath(const TreePath& parent, std::string_view key) : parent_(&parent), name_(key) {}  // an entry

  // "args[1]['mask']"
  std::string to_string() const;

 private:
  const TreePath* parent_ = nullptr;
  std::optional<std::size_t> index_;
  std::string_view name_;  // of the root, or the key
};

// The structure of a tree without its leaves. The kinds of the leaves are not part of it.
class TreeSpec {
 public:
  TreeSpec() = default;                 // of a single leaf
  explicit TreeSpec(const Tree& tree);  // of this tree

  // The number of leaves.
  std::size_t leaf_count() const { return node_ ? node_->leaf_count : 1; }
  // Whether both have the same containers and keys at the same positions.
  bool operator==(const TreeSpec& other) const;
  // Equal specs have equal hashes.
  std::size_t hash() const;

  // "(*, {'mask': *}, [*, *])". Two specs are equal exactly when their texts are.
  std::string to_string() const;
  // The path of each leaf, in order: "args[0]", "args[1]['mask']", ...
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

// A tree taken apart.
struct FlatTree {
  std::vector<Tree> leaves;  // in order
  TreeSpec spec;             // the structure
};

// Takes a tree apart into leaves and structure.
FlatTree flatten_tree(const Tree& tree);

// The inverse of flatten_tree. A "leaf" may itself be a container. Throws ValueError if the number of
// leaves differs from that of the spec.
Tree unflatten_tree(std::vector<Tree> leaves, const TreeSpec& spec);

// Describes where two structures first differ, with the path; returns std::nullopt if they are equal.
std::optional<std::string> first_difference(const TreeSpec& expected, const TreeSpec& actual,
                                            std::string_view root = "args");

// Returns a tree of the same structure, with `change` applied to every leaf.
Tree map_tree(const Tree& tree, const std::function<Tree(const Tree& leaf)>& change);
// Returns a tree of the same structure, with `change` applied to every tensor; other leaves are unchanged.
Tree map_tree_tensors(const Tree& tree, const std::function<at::Tensor(const at::Tensor&)>& change);
// Returns the tensors of a tree, in the order of the leaves.
std::vector<at::Tensor> tensors_of(const Tree& tree);

// Requests tensors that are detached from their autograd graph: flatten_args(args, kDetach).
struct DetachTag {};
// The value to pass.
inline constexpr DetachTag kDetach{};

// Returns the leaves of the arguments of a stage, in order.
std::vector<Tree> flatten_args(const Tree& args);

// Arguments in which every tensor is detached from its autograd graph and keeps its requires_grad, so that
// it is a fresh leaf of autograd; other leaves are unchanged.
struct DetachedArgs {
  Tree args;               // the arguments
  std::vector<Tree> flat;  // their leaves: the same tensors
};

// Detaches the arguments of a stage.
DetachedArgs flatten_args(const Tree& args, DetachTag);

// The former name.
[[deprecated("use flatten_args(args, kDetach)")]] DetachedArgs flatten_args_detach(const Tree& args);

}  // namespace penstock

// Hashes a TreeSpec, for unordered containers.
template <>
struct std::hash<penstock::TreeSpec> {
  // Returns TreeSpec::hash.
  std::size_t operator()(const penstock::TreeSpec& spec) const { return spec.hash(); }
};
