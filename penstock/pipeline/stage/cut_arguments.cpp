#include "penstock/pipeline/stage/cut_arguments.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "penstock/base/warnings.h"

namespace penstock {

Tree CutArguments::cut(const Tree& tree, const char* what) {
  const std::vector<at::Tensor> tensors = tensors_of(tree);
  if (std::none_of(tensors.begin(), tensors.end(),
                   [](const at::Tensor& tensor) { return tensor.requires_grad() && !tensor.is_leaf(); }))
    return tree;
  return map_tree_tensors(tree, [&](const at::Tensor& tensor) {
    if (!tensor.requires_grad() || tensor.is_leaf()) return tensor;
    for (const auto& [given, leaf] : cuts_)
      if (given.is_same(tensor)) return leaf;
    warn_once("pipeline",
              fmt::format("{} of a step: a tensor requires grad and is not a leaf of autograd ({}); its "
                          "gradient is retained in .grad() and is not propagated further: "
                          "pass x.detach().requires_grad_(), or call x.backward(x.grad()) after the step",
                          what, tensor.grad_fn()->name()));
    cuts_.emplace_back(tensor, tensor.detach().set_requires_grad(true));
    return cuts_.back().second;
  });
}

void CutArguments::add_leaf_gradients() {
  const at::NoGradGuard no_grad;
  for (const auto& [given, leaf] : cuts_) {
    if (!leaf.grad().defined()) continue;
    given.retain_grad();
    at::Tensor& gradient = given.mutable_grad();
    gradient = gradient.defined() ? gradient + leaf.grad() : leaf.grad();
  }
}

}  // namespace penstock
