#include "penstock/pytree_convert.h"

#include <ATen/core/jit_type.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

Tree from_ivalue(const c10::IValue& value, const TreePath& path) {
  if (value.isNone()) return {};
  if (value.isTensor()) return value.toTensor();
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();

  std::vector<Tree> entries;
  if (value.isTuple()) {
    for (const auto& entry : value.toTupleRef().elements())
      entries.push_back(from_ivalue(entry, TreePath(path, entries.size())));
    return Tree::tuple(std::move(entries));
  }
  if (value.isList()) {
    for (const auto& entry : value.toListRef())
      entries.push_back(from_ivalue(entry, TreePath(path, entries.size())));
    return Tree::list(std::move(entries));
  }
  if (value.isGenericDict()) {
    std::vector<Tree::Item> items;
    const auto dict = value.toGenericDict();
    for (const auto& entry : dict) {
      // Kept as an object, such a dictionary would hide its tensors from everything that walks the tree.
      if (!entry.key().isString())
        throw TypeError(describe(path.to_string(), "a dictionary with keys of type " + entry.key().tagKind(),
                                 "a dictionary whose keys are strings", "convert the keys to strings"));
      const std::string& key = entry.key().toStringRef();
      items.emplace_back(key, from_ivalue(entry.value(), TreePath(path, key)));
    }
    return Tree::dict(std::move(items));
  }
  return Tree::object(value);
}

// The element type of a list in TorchScript: a list of tensors has a different type than a list of Any.
c10::TypePtr element_type(const std::vector<Tree>& entries) {
  const auto kind = entries.empty() ? Tree::Kind::Tensor : entries.front().kind();
  if (!std::all_of(entries.begin(), entries.end(), [&](const Tree& entry) { return entry.kind() == kind; }))
    return c10::AnyType::get();
  switch (kind) {
    case Tree::Kind::Tensor:
      return c10::TensorType::get();
    case Tree::Kind::Bool:
      return c10::BoolType::get();
    case Tree::Kind::Int:
      return c10::IntType::get();
    case Tree::Kind::Double:
      return c10::FloatType::get();
    case Tree::Kind::String:
      return c10::StringType::get();
    case Tree::Kind::None:
    case Tree::Kind::Object:
    case Tree::Kind::Tuple:
    case Tree::Kind::List:
    case Tree::Kind::Dict:
      break;
  }
  return c10::AnyType::get();
}

}  // namespace

Tree tree_from_ivalue(const c10::IValue& value, std::string_view root) {
  return from_ivalue(value, TreePath(root));
}

c10::IValue tree_to_ivalue(const Tree& tree) {
  switch (tree.kind()) {
    case Tree::Kind::None:
      return {};
    case Tree::Kind::Tensor:
      return tree.tensor();
    case Tree::Kind::Bool:
      return tree.boolean();
    case Tree::Kind::Int:
      return tree.integer();
    case Tree::Kind::Double:
      return tree.number();
    case Tree::Kind::String:
      return tree.text();
    case Tree::Kind::Object:
      return tree.ivalue();
    case Tree::Kind::Tuple: {
      std::vector<c10::IValue> entries;
      for (const Tree& entry : tree.entries()) entries.push_back(tree_to_ivalue(entry));
      return c10::ivalue::Tuple::create(std::move(entries));
    }
    case Tree::Kind::List: {
      c10::impl::GenericList list(element_type(tree.entries()));
      for (const Tree& entry : tree.entries()) list.push_back(tree_to_ivalue(entry));
      return list;
    }
    case Tree::Kind::Dict: {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      for (std::size_t i = 0; i < tree.size(); ++i)
        dict.insert(tree.keys()[i], tree_to_ivalue(tree.entries()[i]));
      return dict;
    }
  }
  invariant_failed("kind", __FILE__, __LINE__, "a kind of tree without a TorchScript form");
}

}  // namespace penstock
