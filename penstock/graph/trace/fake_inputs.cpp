#include "penstock/graph/trace/fake_inputs.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {
namespace {

// Passes gradients on unchanged.
struct PassOn final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

}  // namespace

at::Tensor non_leaf_of(const at::Tensor& leaf, const at::Tensor& data) {
  auto node = make_node<PassOn>();
  node->add_next_edge(torch::autograd::impl::gradient_edge(leaf));
  // Shares the payload of the data, with a version counter of its own.
  at::Tensor result = data.variable_data();
  torch::autograd::create_gradient_edge(result, node);
  return result;
}

}  // namespace penstock::graph
