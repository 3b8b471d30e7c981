#include "penstock/microbatch.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/tree/same_leaf.h"

namespace penstock {
namespace {

constexpr std::string_view kWhole = "whole";

using Reduce = std::function<Tree(const Tree&, const Tree&)>;

// The entry of a spec for a leaf that is reduced.
struct Reducer final : torch::CustomClassHolder {
  Reducer(Tree initial_value, Reduce function)
      : initial(std::move(initial_value)), reduce(std::move(function)) {}
  Tree initial;
  Reduce reduce;
};

// How one leaf is split.
struct LeafRule {
  bool chosen = false;               // chosen by the caller
  std::optional<std::int64_t> dim;   // std::nullopt: whole
  const Reducer* reducer = nullptr;  // owned by the spec, which outlives it
};

LeafRule rule_of(const Tree& spec, const TreePath& place) {
  if (spec.is_none()) return {};
  if (spec.kind() == Tree::Kind::Int) return {true, spec.integer()};
  if (spec.kind() == Tree::Kind::String && spec.text() == kWhole) return {true, std::nullopt};
  if (spec.kind() == Tree::Kind::Object && spec.ivalue().isCapsule())
    if (const auto* reducer = dynamic_cast<const Reducer*>(spec.ivalue().toCapsule().get()))
      return {true, std::nullopt, reducer};
  throw ValueError(describe(fmt::format("the split of {}", place.to_string()), spec.to_string(),
                            "chunk_dim(d), whole() or None, or a reducer where results are merged"));
}

// Calls `visit(leaf, rule, place)` for every leaf.
template <class Visit>
void walk(const Tree& tree, const Tree& spec, const TreePath& place, Visit&& visit) {
  if (tree.is_leaf()) {
    if (!spec.is_leaf())
      throw ValueError(describe(fmt::format("the split of {}", place.to_string()), spec.to_string(),
                                "one entry, because there is one value"));
    return visit(tree, rule_of(spec, place), place);
  }
  const bool inner = !spec.is_leaf();
  if (inner && spec.size() != tree.size())
    throw ValueError(describe(fmt::format("the split of {}", place.to_string()),
                              fmt::format("{} entries", spec.size()),
                              fmt::format("{}, one for each value", tree.size())));
  if (!inner) rule_of(spec, place);
  const bool dict = tree.kind() == Tree::Kind::Dict;
  for (std::size_t i = 0; i < tree.size(); ++i) {
    const TreePath here = dict ? TreePath(place, std::string_view(tree.keys()[i])) : TreePath(place, i);
    if (!inner) {
      walk(tree.entries()[i], spec, here, visit);
    } else if (dict && spec.kind() == Tree::Kind::Dict) {
      const Tree* entry = spec.find(tree.keys()[i]);
      if (!entry)
        throw ValueError(describe(fmt::format("the split of {}", here.to_string()), "nothing",
                                  "an entry for every key", "use None for the default"));
      walk(tree.entries()[i], *entry, here, visit);
    } else {
      walk(tree.entries()[i], spec.entries()[i], here, visit);
    }
  }
}

// Returns the dim along which a leaf is split; std::nullopt for a whole one.
std::optional<std::int64_t> split_dim(const Tree& leaf, const LeafRule& rule, const TreePath& place) {
  if (rule.reducer)
    throw ValueError(describe(fmt::format("the split of {}", place.to_string()), "a reducer",
                              "chunk_dim(d), whole() or None", "use reducers only with merge_microbatches"));
  if (!leaf.is_tensor()) {
    if (rule.dim)
      throw ValueError(describe(fmt::format("the split of {}", place.to_string()),
                                fmt::format("chunk_dim({}) for {}", *rule.dim, leaf.to_string()), "whole()",
                                "only tensors are split"));
    return std::nullopt;
  }
  const std::int64_t ndim = leaf.tensor().dim();
  if (!rule.chosen) return ndim > 0 ? std::optional<std::int64_t>(0) : std::nullopt;
  if (!rule.dim) return std::nullopt;
  if (*rule.dim < -ndim || *rule.dim >= ndim)
    throw ValueError(describe(fmt::format("the split of {}", place.to_string()),
                              fmt::format("chunk_dim({}) for {}", *rule.dim, leaf.to_string()),
                              ndim > 0 ? fmt::format("a dim from {} to {}", -ndim, ndim - 1)
                                       : std::string("whole(), since it has no dims")));
  return *rule.dim < 0 ? *rule.dim + ndim : *rule.dim;
}

// Returns the number of rows of the shortest tensor that is split.
std::int64_t shortest(const Tree& tree, const Tree& spec, std::string_view name) {
  std::int64_t rows = std::numeric_limits<std::int64_t>::max();
  walk(tree, spec, TreePath(name), [&](const Tree& leaf, const LeafRule& rule, const TreePath& place) {
    const auto dim = split_dim(leaf, rule, place);
    if (!dim) return;
    const std::int64_t here = leaf.tensor().size(*dim);
    if (here == 0)
      throw ValueError(describe(fmt::format("the split of {}", place.to_string()), leaf.to_string(),
                                fmt::format("at least one row along dim {}", *dim),
                                "leave the tensor out, or use whole() for it"));
    rows = std::min(rows, here);
  });
  return rows;
}

std::vector<Tree> split_into(const Tree& tree, const Tree& spec, std::int64_t count, std::string_view name) {
  const FlatTree flat = flatten_tree(tree);
  std::vector<std::vector<Tree>> leaves(static_cast<std::size_t>(count));
  walk(tree, spec, TreePath(name), [&](const Tree& leaf, const LeafRule& rule, const TreePath& place) {
    const auto dim = split_dim(leaf, rule, place);
    if (!dim) {
      for (auto& part : leaves) part.push_back(leaf);
      return;
    }
    const std::vector<at::Tensor> parts = leaf.tensor().tensor_split(count, *dim);
    for (std::size_t i = 0; i < leaves.size(); ++i) leaves[i].push_back(parts[i]);
  });
  std::vector<Tree> trees;
  for (auto& part : leaves) trees.push_back(unflatten_tree(std::move(part), flat.spec));
  return trees;
}

void check_count(int count) {
  if (count < 1)
    throw ValueError(describe("the number of microbatches", std::to_string(count), "at least 1"));
}

// Checks parts of one tensor: they may differ only in their length along `dim`.
void check_fits(const at::Tensor& first, const at::Tensor& part, std::int64_t dim, const std::string& what) {
  const auto rest_of = [&](const at::Tensor& tensor) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    if (!sizes.empty()) sizes[static_cast<std::size_t>(dim < 0 ? dim + tensor.dim() : dim)] = 0;
    return sizes;
  };
  if (part.dim() != first.dim() || rest_of(part) != rest_of(first))
    throw ValueError(describe(
        "merge_microbatches: " + what, fmt::format("sizes [{}]", fmt::join(part.sizes(), ", ")),
        fmt::format("sizes [{}] except for dim {}, as in the first", fmt::join(first.sizes(), ", "), dim),
        "make every microbatch return the same shape, or use chunk_dim(d) for the dim that differs"));
}

}  // namespace

Tree chunk_dim(std::int64_t dim) { return Tree(dim); }
Tree whole() { return Tree(kWhole); }

Tree reducer(Tree initial, Reduce f) {
  if (!f) throw ValueError("reducer: the function is empty; pass one that adds a leaf to the value so far");
  return Tree::object(
      c10::IValue::make_capsule(c10::make_intrusive<Reducer>(std::move(initial), std::move(f))));
}

Tree sum_reducer() {
  return reducer(at::zeros({}), [](const Tree& sum, const Tree& leaf) -> Tree {
    switch (leaf.kind()) {
      case Tree::Kind::Tensor:
        return sum.tensor() + leaf.tensor();
      case Tree::Kind::Bool:
        return sum.tensor() + static_cast<std::int64_t>(leaf.boolean());
      case Tree::Kind::Int:
        return sum.tensor() + leaf.integer();
      case Tree::Kind::Double:
        return sum.tensor() + leaf.number();
      default:
        throw TypeError(
            describe("sum_reducer", leaf.to_string(), "a tensor or a number", "use whole() for it"));
    }
  });
}

Microbatches split_microbatches(const Tree& args, const Tree& kwargs, int count, const SplitSpecs& specs) {
  check_count(count);
  if (args.kind() != Tree::Kind::Tuple && args.kind() != Tree::Kind::List)
    throw ValueError(describe("split_microbatches: args", args.to_string(), "a tuple or list of arguments",
                              "wrap a single one: Tree::tuple({x})"));
  const Tree named = kwargs.is_none() ? Tree::dict({}) : kwargs;
  if (named.kind() != Tree::Kind::Dict)
    throw ValueError(describe("split_microbatches: kwargs", kwargs.to_string(), "a dictionary or None"));
  const std::int64_t rows =
      std::min(shortest(args, specs.args, "args"), shortest(named, specs.kwargs, "kwargs"));
  const std::int64_t parts = std::min<std::int64_t>(count, rows);
  return {split_into(args, specs.args, parts, "args"), split_into(named, specs.kwargs, parts, "kwargs")};
}

std::vector<Tree> split_tree(const Tree& tree, int count, const Tree& spec) {
  check_count(count);
  return split_into(tree, spec, std::min<std::int64_t>(count, shortest(tree, spec, "tree")), "tree");
}

Tree merge_microbatches(const std::vector<Tree>& microbatches, const Tree& spec) {
  if (microbatches.empty()) throw ValueError("merge_microbatches: there are no microbatches");
  const TreeSpec structure(microbatches[0]);
  std::vector<std::vector<Tree>> leaves;
  for (std::size_t i = 0; i < microbatches.size(); ++i) {
    if (const auto difference = first_difference(structure, TreeSpec(microbatches[i]), "output"))
      throw ValueError(fmt::format(
          "merge_microbatches: microbatch {} differs in structure from the first: {}", i, *difference));
    leaves.push_back(flatten_tree(microbatches[i]).leaves);
  }
  std::vector<Tree> merged;
  walk(microbatches[0], spec, TreePath("output"),
       [&](const Tree& first, const LeafRule& rule, const TreePath& place) {
         const std::size_t leaf = merged.size();
         if (rule.reducer) {
           Tree value = rule.reducer->initial;
           for (const auto& part : leaves) value = rule.reducer->reduce(value, part[leaf]);
           merged.push_back(std::move(value));
           return;
         }
         const bool scalar = first.is_tensor() && first.tensor().dim() == 0 && !rule.chosen;
         const auto dim = scalar ? std::optional<std::int64_t>(0) : split_dim(first, rule, place);
         if (!dim) {
           for (std::size_t i = 1; i < leaves.size(); ++i)
             if (!same_leaf(first, leaves[i][leaf]))
               throw ValueError(describe(
                   fmt::format("merge_microbatches: {} of microbatch {}", place.to_string(), i),
                   leaves[i][leaf].to_string(), fmt::format("{}, as in the first", first.to_string()),
                   "only tensors that are split may differ; use chunk_dim(d) for them"));
           merged.push_back(first);
           return;
         }
         std::vector<at::Tensor> parts;
         for (const auto& part : leaves) {
           if (!part[leaf].is_tensor())
             throw ValueError(describe(fmt::format("merge_microbatches: {}", place.to_string()),
                                       part[leaf].to_string(), "a tensor, as in the first microbatch"));
           parts.push_back(part[leaf].tensor());
           check_fits(parts.front(), parts.back(), *dim,
                      fmt::format("{} of microbatch {}", place.to_string(), parts.size() - 1));
         }
         merged.push_back(scalar ? at::stack(parts) : at::cat(parts, *dim));
       });
  return unflatten_tree(std::move(merged), structure);
}

}  // namespace penstock
