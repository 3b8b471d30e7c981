// Changing what a leaf is, again and again, under the eyes of autograd.
//
// replace_data (wrapper.h) is for good: it forgets the gradient accumulator, since shape and type may be new. A sharded parameter
// goes back and forth between its part and the whole many times a step, with the same sizes, and graphs hold it in between.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace penstock {

// Makes `self`, through every handle to it, what `other` is: memory, payload, dtype, dispatch keys. Version counter, requires_grad,
// grad, hooks and the gradient accumulator of `self` stay. Both must have the same sizes and `self` be a leaf.
void switch_data(const at::Tensor& self, const at::Tensor& other);

// Keeps an object alive as long as the tensor lives, whatever it becomes. The tensor is a leaf of floating point.
void tie_lifetime(const at::Tensor& tensor, std::shared_ptr<void> object);

}  // namespace penstock
