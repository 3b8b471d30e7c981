// Replaces the contents of a leaf repeatedly while autograd graphs refer to it.
//
// replace_data (wrapper.h) is permanent: it drops the gradient accumulator, since shape and type may change.
// A sharded parameter alternates between its shard and the whole many times per step, with the same sizes,
// while graphs hold it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace penstock {

// Gives `self`, through every handle to it, the memory, payload, dtype and dispatch keys of `other`. The
// version counter, requires_grad, grad, hooks and gradient accumulator of `self` are kept. Both must have the
// same sizes, and `self` must be a leaf.
void switch_data(const at::Tensor& self, const at::Tensor& other);

// Keeps an object alive as long as the tensor lives, whatever its contents become. The tensor must be a
// floating-point leaf.
void tie_lifetime(const at::Tensor& tensor, std::shared_ptr<void> object);

}  // namespace penstock
