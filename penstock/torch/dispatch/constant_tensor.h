// Tensors whose values never change and follow from the program and its configuration alone: tables that a
// module computes once, such as those of rotary embeddings. They are neither parameters nor buffers.
//
//   table_ = constant_tensor(at::arange(0, context));
//
// A captured graph that uses one may be kept between runs with its values
// (docs/compile_cache.md); other tensors that a program holds may change, and keep a graph from being stored.
// Thread safety: any thread.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock {

// Declares a tensor as constant, with everything that shares its memory, and returns it. It must not be
// written afterwards: is_constant_tensor is then false.
at::Tensor constant_tensor(at::Tensor tensor);

// Whether the tensor uses memory that was declared as constant and has not been written since.
bool is_constant_tensor(const at::Tensor& tensor);

}  // namespace penstock
