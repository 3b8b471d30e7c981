// Fake tensors of subclasses: a wrapper of the same kind and context around fake tensors.
//
//   at::Tensor fake = to_fake_parts(dtensor);      // a DTensor of the same mesh and placements whose local part is fake
//   const FakeLeaves scope({layer->weight});       // until the scope ends, whoever holds the weight sees the fake one
//
// Thread rule: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace penstock {

// The same tensor in shape only; a subclass (wrapper.h) becomes one around fake tensors. requires_grad carries over. Throws NotImplemented for
// a subclass that cannot be taken apart, TypeError for one whose kind is not registered.
at::Tensor to_fake_parts(const at::Tensor& tensor);

// Leaves that are fake for a while, through every handle. Their version counters, gradients, hooks and gradient accumulators stay. Tensors that
// are fake already, or hold a fake tensor, and results of differentiable operators are left alone. Scopes end in reverse order.
class FakeLeaves {
 public:
  explicit FakeLeaves(const std::vector<at::Tensor>& tensors);
  ~FakeLeaves();
  FakeLeaves(const FakeLeaves&) = delete;
  FakeLeaves& operator=(const FakeLeaves&) = delete;

 private:
  friend class RealLeaves;
  std::vector<std::pair<at::Tensor, at::Tensor>> replaced_;  // the tensor, and what it was
};

// What the scopes of FakeLeaves around this one have made fake on this thread is real while it lives.
class RealLeaves {
 public:
  RealLeaves();
  ~RealLeaves();
  RealLeaves(const RealLeaves&) = delete;
  RealLeaves& operator=(const RealLeaves&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> replaced_;
};

}  // namespace penstock
