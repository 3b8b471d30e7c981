// The library's own shape functions, one file per family of operators. Private to this folder.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace penstock::detail {

// All families; called once, at the first fake operator.
void add_own_shape_functions();

void add_attention_shapes();
void add_convolution_shapes();
void add_embedding_shapes();
void add_foreach_shapes();
void add_loss_shapes();
void add_normalization_shapes();
void add_pointwise_shapes();
void add_pooling_shapes();
void add_random_shapes();
void add_reduction_shapes();
void add_vendor_shapes();

// Boxed shape functions that fake_rules.cpp assigns to operators by their kind. For an operator that writes
// its arguments and returns nothing, without changing shapes.
void write_only(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// For an in-place or out= overload: uses the shape of the functional overload.
void shape_of_functional(const c10::OperatorHandle& op, torch::jit::Stack* stack);
c10::optional<c10::OperatorHandle> functional_overload(const c10::OperatorHandle& op);

// Runs an operator on meta tensors by its shape function if it has one, otherwise by LibTorch's kernel.
void call_shape_only(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace penstock::detail
