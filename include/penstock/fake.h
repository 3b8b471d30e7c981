// Fake tensors: tensors with sizes, strides, dtype and device, but without memory. Real modules run forward
// and backward on them without computing or allocating anything, to find out shapes.
//
//   FakeMode fake;
//   {
//     ModeGuard guard(fake);
//     torch::nn::Linear layer(65536, 65536);                     // allocates nothing
//     auto out = layer->forward(torch::empty({8, 65536}));
//     out.sum().backward();                                     // layer->weight.grad() has sizes and strides
//   }
//   auto half = make_fake({8, 16}, at::device(at::kCUDA).dtype(at::kHalf));   // needs no GPU
//   auto product = half.matmul(half.t());                        // fake too, without the mode
//
// Results have the sizes, strides, dtype, device and aliasing of a real run. An operator whose result depends
// on values (item(), nonzero(), indexing with a mask) throws DataDependentError. Random generators are not
// changed. Gradients of fake CUDA tensors need a LibTorch that was built with CUDA, but no GPU.
//
// Under the mode, real tensors are treated as fake: their metadata is used, they are never written, and a run
// of a real module leaves its parameters, buffers and counters unchanged. Reading a value of a real tensor
// (item()) works. Without the mode, fake and real tensors may be mixed, but writing to a real tensor is an
// error. Tensors on different devices in one operator are an error as in a real run; the message says which
// tensors are fake.
//
// Code that does not use operators, such as torch::tensor({1, 2, 3}), which fills memory directly, cannot run
// under the mode; put it into a NoModesGuard.
//
// Thread safety: as for modes and tensors. Shape functions may be registered from any thread.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>

#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/mode.h"

namespace penstock {

// Thrown by an operator whose result depends on values that a fake tensor does not have.
class DataDependentError : public ValueError {
 public:
  using ValueError::ValueError;
};

// Makes every tensor created in its scope fake. See ModeGuard.
class FakeMode final : public Mode {
 public:
  // Runs the operator on metadata only.
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;
};

// Returns whether a tensor is fake.
bool is_fake(const at::Tensor& tensor);

// Returns a fake tensor with the metadata of a real one, including requires_grad.
at::Tensor to_fake(const at::Tensor& real);
// As above, on another device.
at::Tensor to_fake(const at::Tensor& real, at::Device device);
// Returns a contiguous fake tensor of these sizes.
at::Tensor make_fake(at::IntArrayRef sizes, const at::TensorOptions& options = {});
// Returns a fake tensor of these sizes and strides.
at::Tensor make_fake_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                             const at::TensorOptions& options = {});

// ---- shape functions ----

// Sets the shape function of an operator for which LibTorch has no shape-only kernel. The function gets the
// arguments of the operator with every tensor on the meta device and returns results on the meta device:
//
//   register_shape_function("my::blur",
//                           [](const at::Tensor& image, int64_t radius) { return at::empty_like(image); });
//
// Its signature is that of the operator, with int64_t for SymInt and at::IntArrayRef for SymInt[]; lambdas
// must not capture. It takes precedence over LibTorch's kernel, and also serves the in-place and out=
// overloads of the operator that have none of their own. Throws StateError for a second function for the same
// operator, TypeError for a wrong number of arguments.
template <class Function>
void register_shape_function(const std::string& op, Function function);

// Returns whether an operator ("aten::add.Tensor") can run on fake tensors, for tests and reports.
bool has_shape_function(const std::string& op);

namespace detail {
// `arguments`: how many the function takes; negative for boxed ones, which take any.
void add_shape_function(const std::string& op, c10::KernelFunction kernel, int arguments);
template <class Result, class... Arguments>
constexpr int argument_count(Result (*)(Arguments...)) {
  return static_cast<int>(sizeof...(Arguments));
}
}  // namespace detail
template <class Function>
void register_shape_function(const std::string& op, Function function) {
  detail::add_shape_function(op, c10::KernelFunction::makeFromUnboxedRuntimeFunction(+function),
                             detail::argument_count(+function));
}

}  // namespace penstock
