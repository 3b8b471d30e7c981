// A batch becomes microbatches, and their results one batch again.
//
//   Microbatches parts = split_microbatches(Tree::tuple({tokens, mask}), {}, 4);                  // both along dim 0
//   parts = split_microbatches(Tree::tuple({x, positions}), {}, 4, {.args = Tree::tuple({chunk_dim(1), whole()})});
//   Tree outputs = merge_microbatches(results);                                                   // joined along dim 0
//
// How a leaf is split, by a tree of the same structure as the arguments, or of its upper part: what stands at a container
// counts for all of its leaves, and None is the default.
//   chunk_dim(d)   tensors: along dim d, as evenly as can be, the first ones larger: 10 rows in 4 are 3, 3, 2, 2
//   whole()        the same value in every microbatch
//   default        tensors with dims along dim 0, all else whole
//
// Results are joined by the same specs, and a leaf of theirs may be reduced instead:
//   sum_reducer()            the sum over the microbatches, beginning with 0: for losses
//   reducer(initial, f)      f(...f(f(initial, first), second)..., last)
//
// There are never more microbatches than the shortest tensor that is split has rows; the result says how many there are.
// Parts are views. Pure functions; a distributed tensor is split as the tensor it stands for.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

Tree chunk_dim(std::int64_t dim);
Tree whole();
// Of merge_microbatches alone. `f` gets the value so far and the leaf of the next microbatch, in their order.
Tree reducer(Tree initial, std::function<Tree(const Tree& sum, const Tree& leaf)> f);
// Tensors of any shape that fit each other, and numbers: a float32 tensor of no dims is what it begins with, so numbers add up to one,
// and integers to floating point.
Tree sum_reducer();

struct SplitSpecs {
  Tree args;    // None: the default everywhere
  Tree kwargs;
};

struct Microbatches {
  std::vector<Tree> args, kwargs;  // one of each for every microbatch
  std::size_t count() const { return args.size(); }
};

// `args` is a tuple or list, `kwargs` a dictionary or None. Throws ValueError for fewer than one microbatch, a spec of another
// structure, a dim that a tensor does not have, a chunk_dim for what is no tensor, and a tensor without rows to split; each
// names the place.
Microbatches split_microbatches(const Tree& args, const Tree& kwargs, int count, const SplitSpecs& specs = {});
// Of one tree: targets, for example.
std::vector<Tree> split_tree(const Tree& tree, int count, const Tree& spec = {});

// The inverse: tensors are joined along their dim, everything else must be the same in all microbatches. By default tensors without dims
// become one of as many elements, and values that agree are kept, where PyTorch's merge_chunks refuses both. Throws ValueError, with the place, for trees that differ in structure, for a spec that does not
// fit, for values that differ where they should not, and for no microbatches at all.
Tree merge_microbatches(const std::vector<Tree>& microbatches, const Tree& spec = {});

}  // namespace penstock
