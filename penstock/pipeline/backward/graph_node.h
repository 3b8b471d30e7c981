// A backward pass that starts at many places of an autograd graph.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "penstock/torch/compat/autograd_node.h"

namespace penstock {

// The root of a backward pass that starts at many places. Unlike the engine's own root it moves each gradient
// out, so that a gradient is freed as soon as it is used, and a place may be started without a gradient.
class StartNode final : public torch::autograd::Node {
 public:
  // `edges` and `grads` correspond by index. `trigger` is on the device of the gradients: the engine takes
  // device and stream from it.
  StartNode(torch::autograd::edge_list&& edges, torch::autograd::variable_list grads,
            const at::Tensor& trigger)
      : Node(std::move(edges)), grads_(std::move(grads)) {
    add_input_metadata(trigger);
  }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    return std::move(grads_);
  }

  torch::autograd::variable_list grads_;
};

// A backward pass that can be run once, later.
struct PreparedBackward {
  NodePtr start;
  at::Tensor trigger;

  // `like` is any of the gradients that will flow.
  static PreparedBackward from(torch::autograd::edge_list edges, torch::autograd::variable_list grads,
                               const at::Tensor& like) {
    const at::Tensor trigger = at::empty({0}, at::TensorOptions().device(like.device()));
    return {make_node<StartNode>(std::move(edges), std::move(grads), trigger), trigger};
  }

  void run() && {
    const torch::autograd::edge_list roots{{std::move(start), 0}};
    torch::autograd::Engine::get_default_engine().execute(
        roots, {trigger}, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
  }
};

}  // namespace penstock
