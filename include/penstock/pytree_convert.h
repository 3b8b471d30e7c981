// Conversions between trees and C++ and TorchScript types.
//
//   Tree args = Tree::tuple({torch::ones({2}), std::nullopt});
//   auto [input, mask] = tree_to<std::tuple<at::Tensor, std::optional<at::Tensor>>>(args);
//   auto kwargs = tree_to<std::map<std::string, double>>(Tree::dict({{"scale", 0.5}}), "kwargs");
//   Tree output = tree_from_ivalue(c10::IValue(torch::ones({2})), "output");
//
// A mismatch throws a TypeError that names the position: "args[1]: got a list of 2, expected a tensor". To
// build trees, use Tree's constructors.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

// Returns a TorchScript value as a tree. Tuples, lists of any element type and dictionaries with string
// keys become containers (a named tuple becomes a tuple); numbers, strings and tensors become leaves;
// everything else becomes an Object leaf. Throws TypeError for a dictionary with other keys.
Tree tree_from_ivalue(const c10::IValue& value, std::string_view root = "args");

// Returns a tree as a TorchScript value. A list whose entries are all tensors, ints, doubles, bools or
// strings becomes a list of that type; other lists become lists of Any, and an empty one becomes a list of
// tensors. A dictionary becomes Dict(str, Any).
c10::IValue tree_to_ivalue(const Tree& tree);

namespace detail {

// Throws the TypeError of a mismatch.
[[noreturn]] void refuse_tree(const Tree& tree, const TreePath& path, std::string_view expected);

// How tree_to reads a T.
template <class T>
struct TreeReader;

template <>
struct TreeReader<Tree> {
  static Tree read(const Tree& tree, const TreePath&) { return tree; }
};
template <>
struct TreeReader<at::Tensor> {
  static at::Tensor read(const Tree& tree, const TreePath& path) {
    if (!tree.is_tensor()) refuse_tree(tree, path, "a tensor");
    return tree.tensor();
  }
};
template <>
struct TreeReader<bool> {
  static bool read(const Tree& tree, const TreePath& path) {
    if (tree.kind() != Tree::Kind::Bool) refuse_tree(tree, path, "a bool");
    return tree.boolean();
  }
};
template <std::integral T>
struct TreeReader<T> {
  static T read(const Tree& tree, const TreePath& path) {
    if (tree.kind() != Tree::Kind::Int) refuse_tree(tree, path, "an int");
    if (!std::in_range<T>(tree.integer())) refuse_tree(tree, path, "an int that fits the requested type");
    return static_cast<T>(tree.integer());
  }
};
template <std::floating_point T>
struct TreeReader<T> {
  static T read(const Tree& tree, const TreePath& path) {
    if (tree.kind() != Tree::Kind::Double && tree.kind() != Tree::Kind::Int)
      refuse_tree(tree, path, "a number");
    return static_cast<T>(tree.number());
  }
};
template <>
struct TreeReader<std::string> {
  static std::string read(const Tree& tree, const TreePath& path) {
    if (tree.kind() != Tree::Kind::String) refuse_tree(tree, path, "a string");
    return tree.text();
  }
};
template <class T>
struct TreeReader<std::optional<T>> {
  static std::optional<T> read(const Tree& tree, const TreePath& path) {
    if (tree.is_none()) return std::nullopt;
    return TreeReader<T>::read(tree, path);
  }
};
template <class T>
struct TreeReader<std::vector<T>> {
  static std::vector<T> read(const Tree& tree, const TreePath& path) {
    if (tree.kind() != Tree::Kind::List && tree.kind() != Tree::Kind::Tuple)
      refuse_tree(tree, path, "a list or a tuple");
    std::vector<T> values;
    values.reserve(tree.size());
    for (std::size_t i = 0; i < tree.size(); ++i)
      values.push_back(TreeReader<T>::read(tree[i], TreePath(path, i)));
    return values;
  }
};
template <class... Ts>
struct TreeReader<std::tuple<Ts...>> {
  static std::tuple<Ts...> read(const Tree& tree, const TreePath& path) {
    const bool fits =
        (tree.kind() == Tree::Kind::List || tree.kind() == Tree::Kind::Tuple) && tree.size() == sizeof...(Ts);
    if (!fits) refuse_tree(tree, path, "a tuple of " + std::to_string(sizeof...(Ts)));
    return read_each(tree, path, std::index_sequence_for<Ts...>{});
  }

 private:
  template <std::size_t... I>
  static std::tuple<Ts...> read_each(const Tree& tree, [[maybe_unused]] const TreePath& path,
                                     std::index_sequence<I...>) {
    return std::tuple<Ts...>{TreeReader<Ts>::read(tree[I], TreePath(path, I))...};
  }
};
template <class T>
struct TreeReader<std::map<std::string, T>> {
  static std::map<std::string, T> read(const Tree& tree, const TreePath& path) {
    if (tree.kind() != Tree::Kind::Dict) refuse_tree(tree, path, "a dictionary");
    std::map<std::string, T> values;
    for (std::size_t i = 0; i < tree.size(); ++i)
      values.emplace(tree.keys()[i], TreeReader<T>::read(tree.entries()[i], TreePath(path, tree.keys()[i])));
    return values;
  }
};

}  // namespace detail

// Returns the tree as a T: at::Tensor, bool, integers, floating point, std::string, Tree, and std::optional,
// std::vector, std::tuple and std::map<std::string, ...> of these.
template <class T>
T tree_to(const Tree& tree, std::string_view root = "args") {
  return detail::TreeReader<T>::read(tree, TreePath(root));
}

}  // namespace penstock
