// Replaces step arguments that require grad and are results of other operators by leaves of autograd.
//
// The graph of an argument cannot be traversed once per microbatch: the first backward frees it. The step
// therefore cuts the graph at such a tensor: the stages get a leaf in its place, a warning is issued once,
// and after the step the tensor has its gradient in .grad(), as a leaf would. The caller can continue from
// there: x.backward(x.grad()).
// Activations between stages are always leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "penstock/pytree.h"

namespace penstock {

class CutArguments {
 public:
  // Returns the tree with leaves in place of such tensors; a tensor that occurs twice becomes one leaf.
  // `what` names the tree in the warning.
  Tree cut(const Tree& tree, const char* what);
  // Adds the gradients of the leaves to the .grad() of the tensors, which retain their gradients.
  void add_leaf_gradients();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> cuts_;  // the original tensor, and the leaf
};

}  // namespace penstock
