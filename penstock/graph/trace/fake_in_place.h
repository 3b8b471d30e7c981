// Makes existing tensors fake for the duration of a scope, for everyone who holds a handle to them.
//
//   {
//     const FakeInPlace scope({layer->weight, layer->bias});
//     is_fake(layer->weight);        // true; it is still the same autograd leaf
//   }                                // real again, with its original memory
//
// A module holds its parameters by handles that cannot be exchanged from outside. To let a capture run the
// module's own code, the tensors behind the handles change. The autograd state stays: requires_grad, grad,
// hooks.
// Nobody else may use the tensors during the scope. Thread safety: use from one thread.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <vector>

#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {

class FakeInPlace {
 public:
  // A subclass becomes one around fake tensors. Tensors on the meta device, which have no memory, become fake
  // tensors on `of_meta` if it is given. Throws StateError for a tensor that autograd has computed, TypeError
  // for one that is already fake; in both cases all tensors are unchanged.
  explicit FakeInPlace(const std::vector<at::Tensor>& tensors,
                       std::optional<at::Device> of_meta = std::nullopt);
  ~FakeInPlace();
  FakeInPlace(const FakeInPlace&) = delete;
  FakeInPlace& operator=(const FakeInPlace&) = delete;

 private:
  struct Replaced {
    at::Tensor tensor, real;
    WeakNodePtr accumulator;  // replacing the data would create another one, without this one's hooks
    // Removed during the scope: differentiating inside it must not call hooks that expect a real gradient.
    decltype(torch::autograd::AutogradMeta::hooks_) hooks;
    // What they call. A hook that is set inside the scope belongs to the fake tensor, and goes with it.
    decltype(torch::autograd::AutogradMeta::cpp_hooks_list_) hook_functions;
    // It was on the meta device, whose tensors LibTorch does not let others replace.
    bool switched = false;
  };
  void restore() noexcept;

  std::vector<Replaced> replaced_;
};

}  // namespace penstock::graph
