// Fake versions of tensor subclasses: a wrapper of the same kind and context around fake tensors.
//
//   // a DTensor of the same mesh and placements whose local part is fake
//   at::Tensor fake = to_fake_parts(dtensor);
//   // within the scope every handle to the weight sees the fake one
//   const FakeLeaves scope({layer->weight});
//
// Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace penstock {

// Returns a fake version of the tensor; a subclass (wrapper.h) is rebuilt around fake tensors. requires_grad
// is kept. Throws NotImplemented for a subclass that cannot be flattened, TypeError for one whose kind is not
// registered.
at::Tensor to_fake_parts(const at::Tensor& tensor);

// Makes leaves fake within a scope, through every handle. Their version counters, gradients, hooks and
// gradient accumulators are kept. Tensors that are already fake or hold a fake tensor, and results of
// differentiable operators, are left unchanged. Scopes must end in reverse order.
class FakeLeaves {
 public:
  explicit FakeLeaves(const std::vector<at::Tensor>& tensors);
  ~FakeLeaves();
  FakeLeaves(const FakeLeaves&) = delete;
  FakeLeaves& operator=(const FakeLeaves&) = delete;

 private:
  friend class RealLeaves;
  std::vector<std::pair<at::Tensor, at::Tensor>> replaced_;  // the tensor, and its previous contents
};

// Restores, within its scope, the real contents of the leaves that enclosing FakeLeaves scopes of this thread
// have made fake.
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
