// Results whose users give back no gradient at all: an operator's backward gets an undefined tensor.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace penstock::test {

struct GivesNoGradient : torch::autograd::Function<GivesNoGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

// As with LibTorch's operators, which leave the gradients of their inputs undefined then.
inline void expect_no_gradient(const at::Tensor& y, const std::vector<at::Tensor>& inputs) {
  for (const bool create_graph : {false, true})
    for (const at::Tensor& gradient :
         torch::autograd::grad({GivesNoGradient::apply(y).sum()}, inputs, {}, /*retain_graph=*/true,
                               create_graph, /*allow_unused=*/true))
      EXPECT_FALSE(gradient.defined());
}

}  // namespace penstock::test
