// Arguments of a step that require grad and are results of other operators, not leaves of autograd.
//
// A graph behind an argument cannot be walked once per microbatch: the first backward frees it. So the step stops at such a tensor:
// the stages get a leaf in its place, a warning says so, once, and when the step has ended the tensor holds its gradient in .grad(),
// as a leaf would. Going on from there is the caller's: x.backward(x.grad()).
// Activations between stages are leaves of their own from the start.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "penstock/pytree.h"

namespace penstock::pipeline {

class CutArguments {
 public:
  // The tree with leaves in the places of such tensors; a tensor that occurs twice is one leaf. `what` names the tree in the warning.
  Tree cut(const Tree& tree, const char* what);
  // Adds the gradients that the leaves got to the .grad() of the tensors, which is retained.
  void give_gradients();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> cuts_;  // the tensor given, and the leaf
};

}  // namespace penstock::pipeline
