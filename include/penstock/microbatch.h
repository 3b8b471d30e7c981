// Splits a batch into microbatches, and merges their results into one batch.
//
//   Microbatches parts = split_microbatches(Tree::tuple({x, y}), {}, 4);  // both along dim 0
//   SplitSpecs specs;
//   specs.args = Tree::tuple({chunk_dim(1), whole()});
//   Microbatches others = split_microbatches(Tree::tuple({x, y}), {}, 4, specs);
//   Tree merged = merge_microbatches(parts.args);                         // along dim 0
//
// A spec says how each leaf is split: chunk_dim(d), whole(), or None for the default, which splits tensors
// that have dims along dim 0 and keeps everything else whole. A spec is a tree with the structure of the
// arguments, or of their upper part: an entry in place of a container applies to all of its leaves.
//
// Results are merged by specs of the same form, in which a leaf may also be reduced: sum_reducer(),
// reducer(initial, f).
//
// There are never more microbatches than the shortest split tensor has rows; Microbatches::count() returns
// their number. Parts are views. A distributed tensor is split like the whole tensor that it represents.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

// Splits tensors along `dim`, as evenly as possible, larger parts first: 10 rows in 4 parts are 3, 3, 2, 2. A
// negative dim counts from the end.
Tree chunk_dim(std::int64_t dim);
// Passes the same value to every microbatch.
Tree whole();
// For merge_microbatches only: computes f(...f(f(initial, first), second)..., last). `f` gets the value so
// far and the leaf of the next microbatch, in order. Throws ValueError if `f` is empty.
Tree reducer(Tree initial, std::function<Tree(const Tree& sum, const Tree& leaf)> f);
// For merge_microbatches only: the sum over the microbatches, for losses. Takes tensors whose shapes can be
// broadcast, and numbers. The sum starts from a float32 zero without dims, so numbers add up to a tensor, and
// integers to floating point. Merging throws TypeError for other leaves.
Tree sum_reducer();

// How arguments are split. None is the default everywhere.
struct SplitSpecs {
  Tree args;    // spec of the positional arguments
  Tree kwargs;  // spec of the keyword arguments
};

// The arguments of all microbatches.
struct Microbatches {
  std::vector<Tree> args;    // positional arguments of each microbatch
  std::vector<Tree> kwargs;  // keyword arguments of each microbatch, a dictionary
  // Returns the number of microbatches.
  std::size_t count() const { return args.size(); }
};

// Splits arguments into at most `count` microbatches. `args` is a tuple or list, `kwargs` a dictionary or
// None. Throws ValueError for a count less than 1, for other arguments, and with the path of the leaf for a
// spec of a different structure, a dim that a tensor does not have, chunk_dim for a value that is not a
// tensor, a reducer, and a tensor without rows.
Microbatches split_microbatches(const Tree& args, const Tree& kwargs, int count,
                                const SplitSpecs& specs = {});
// Splits one tree, such as the target, in the same way.
std::vector<Tree> split_tree(const Tree& tree, int count, const Tree& spec = {});

// Merges the results of microbatches. Tensors are concatenated along their dim; everything else must be equal
// in all microbatches. By default, tensors without dims are stacked, and equal values are kept; PyTorch's
// merge_chunks rejects both. Throws ValueError, with the path of the leaf, for trees of different structures,
// a spec that does not fit, tensors whose shapes do not fit and values that differ; also if there are no
// microbatches.
Tree merge_microbatches(const std::vector<Tree>& microbatches, const Tree& spec = {});

}  // namespace penstock
