// Fake tensors: tensors with sizes, strides, dtype and device, but without memory. A model runs on them in shape only:
// forward and backward of real modules, in microseconds an operator, without allocating anything.
//
//   penstock::FakeMode fake;
//   {
//     penstock::ModeGuard guard(fake);
//     torch::nn::Linear layer(65536, 65536);                        // no memory
//     auto y = layer->forward(torch::empty({8, 65536}));
//     y.sum().backward();                                           // y.sizes(), layer->weight.grad().strides() ... as in earnest
//   }
//   auto x = penstock::make_fake({8, 16}, at::device(at::kCUDA).dtype(at::kHalf));   // needs no GPU; gradients of it need CUDA
//   auto z = x.matmul(x.t());                                       // fake spreads without the mode, too
//
// What a real run would give in sizes, strides, dtype, device and aliasing, a fake run gives too. Values do not exist:
// an operator whose result depends on them (item(), nonzero(), indexing with a mask) throws DataDependentError and never
// invents one. Random generators are not touched.
//
// Under the mode real tensors take part as if they were fake: they are read for their metadata only and never written, so
// a trial run of a real module leaves its parameters, buffers and counters as they were. Reading a value of a real tensor
// (item()) works. Without the mode a fake tensor may meet real ones, but writing a real one is an error.
// Tensors on different devices in one operator are an error as in earnest, which says which ones are fake.
//
// Code that goes around the operators, like torch::tensor({1, 2, 3}) which fills memory by hand, cannot run under the
// mode: put it under NoModesGuard.
// Thread rule: as for modes and tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>

#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/mode.h"

namespace penstock {

// An operator whose result depends on values that a fake tensor does not have.
class DataDependentError : public ValueError {
 public:
  using ValueError::ValueError;
};

class FakeMode final : public Mode {
 public:
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;
};

bool is_fake(const at::Tensor& tensor);

// A fake tensor with the metadata of a real one (requires_grad included), or of the given shape.
at::Tensor to_fake(const at::Tensor& real);
at::Tensor to_fake(const at::Tensor& real, at::Device device);
at::Tensor make_fake(at::IntArrayRef sizes, const at::TensorOptions& options = {});
at::Tensor make_fake_strided(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options = {});

// ---- shape functions: for operators that LibTorch gives no shape-only kernel ----

// Gets the operator's arguments with every tensor on the meta device and returns results on the meta device:
//
//   register_shape_function("my::blur", [](const at::Tensor& image, int64_t radius) { return at::empty_like(image); });
//
// The signature is that of the operator with int64_t for SymInt and at::IntArrayRef for SymInt[]; capture nothing. A
// function registered here goes before LibTorch's own, and serves the in-place and out= overloads of the operator too where
// those have none. A second one for the same operator is a StateError, a wrong number of arguments a TypeError.
template <class Function>
void register_shape_function(const std::string& op, Function function);

// True when a fake tensor can go through the operator ("aten::add.Tensor"): for tests and reports.
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
  detail::add_shape_function(op, c10::KernelFunction::makeFromUnboxedRuntimeFunction(+function), detail::argument_count(+function));
}

}  // namespace penstock
