// Values that travel from one autograd node to the next one inside of a gradient that has no elements.
//
//   at::Tensor gradient = carry({{a, b}}, at::kCPU);          // returned by a node as one of its gradients
//   std::vector<at::Tensor> values = take_carried(gradient);  // in the node that gets it
//
// Autograd passes the tensor on as it is and frees it like any gradient, and with it the values. Each
// backward carries its own: nothing is stored in the nodes. Private to this folder.
// Thread safety: that of a standard container.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace penstock::graph {

struct CarriedValues {
  std::vector<at::Tensor> tensors;
  bool are_gradients = false;  // they are the results of the node that gets them
};

// A tensor of no floats on the device: engines run a node where its gradients are.
at::Tensor carry(CarriedValues values, at::Device device);
// Moves the values out, unless somebody else has the tensor, too. std::nullopt: a tensor of another kind, or
// none.
std::optional<CarriedValues> take_carried(at::Tensor carrier);

}  // namespace penstock::graph
