// Tensors that are fake for a while, for everybody who holds them.
//
//   {
//     const FakeInPlace scope({layer->weight, layer->bias});
//     is_fake(layer->weight);        // true; it still is the leaf of autograd that it was
//   }                                // real again, with the memory it had
//
// A module holds its parameters by handles that nobody else can exchange; so that a capture may run the module's own code, the tensors
// behind the handles change. What belongs to autograd stays: requires_grad, grad, hooks.
// Nobody else may use the tensors while the scope lives. Thread rule: one thread.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {

class FakeInPlace {
 public:
  // A subclass becomes one around fake tensors. Throws StateError for a tensor that autograd has computed, TypeError for one that is fake already; all
  // are as before then.
  explicit FakeInPlace(const std::vector<at::Tensor>& tensors);
  ~FakeInPlace();
  FakeInPlace(const FakeInPlace&) = delete;
  FakeInPlace& operator=(const FakeInPlace&) = delete;

 private:
  struct Replaced {
    at::Tensor tensor, real;
    WeakNodePtr accumulator;  // replacing the data would make another, without the hooks of this one
    // Kept away meanwhile: differentiating inside of the scope must not call what waits for a real gradient.
    decltype(torch::autograd::AutogradMeta::hooks_) hooks;
  };
  void restore() noexcept;

  std::vector<Replaced> replaced_;
};

}  // namespace penstock::graph
