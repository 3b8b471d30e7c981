#include "penstock/dtensor/tensor/composites.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/operator_traits.h"

namespace penstock::detail {

void link_composites() {}

namespace {

// Returns whether the first argument is distributed; if not, runs the original composite kernel.
bool is_ours(const c10::OperatorHandle& op, Stack* stack) {
  if (is_dtensor((*stack)[stack->size() - op.schema().arguments().size()].toTensor())) return true;
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  return false;
}

// LibTorch scatters into plain zeros.
void one_hot(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!is_ours(op, stack)) return;
  const at::Tensor self = (*stack)[stack->size() - 2].toTensor();
  std::int64_t classes = stack->back().toInt();
  stack->resize(stack->size() - 2);
  if (self.scalar_type() != at::kLong)
    throw TypeError(describe("one_hot: dtype of the classes", c10::toString(self.scalar_type()), "int64"));
  const bool known = classes > 0;
  if (self.numel() > 0) {
    const std::int64_t least = self.min().item<std::int64_t>(), most = self.max().item<std::int64_t>();
    if (least < 0 || (known && most >= classes))
      throw ValueError(describe("one_hot: classes", fmt::format("from {} to {}", least, most),
                                known ? fmt::format("from 0 to {}", classes - 1) : std::string("0 or more"),
                                "set num_classes above the largest class"));
    if (!known) classes = most + 1;
  } else if (!known) {
    throw ValueError(describe("one_hot: num_classes", fmt::format("{}", classes),
                              "a number above 0, for a tensor without elements"));
  }
  const ImplicitReplicationGuard positions_are_equal;
  stack->push_back(self.unsqueeze(-1)
                       .eq(at::arange(classes, at::TensorOptions(at::kLong).device(self.device())))
                       .to(at::kLong));
}

// LibTorch creates a plain tensor of indices, equal on every rank.
void repeat_interleave(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!is_ours(op, stack)) return;
  const ImplicitReplicationGuard indices_are_equal;
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

void add_kernels(torch::Library& library) {
  library.impl("one_hot", torch::CppFunction::makeFromBoxedFunction<&one_hot>());
  library.impl("repeat_interleave.self_int", torch::CppFunction::makeFromBoxedFunction<&repeat_interleave>());
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { add_kernels(library); }

}  // namespace
}  // namespace penstock::detail
