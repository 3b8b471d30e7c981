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
#include <torch/nn/module.h>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/tensor_subclass.h"

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

// ---- deferred initialization ----
//
// Builds a module without memory and allocates and initializes it later, as a whole or in parts.
//
//   DeferredInit deferred;
//   torch::nn::Sequential layers;
//   {
//     ModeGuard guard(deferred);
//     layers = torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Linear(64, 8));   // fake
//   }
//   deferred.materialize(*layers[1]);      // memory and values of the second layer only
//   deferred.materialize(*layers);         // and of the rest
//
// Under this mode tensors are fake (fake.h), and the operators that would have filled them are recorded. To
// materialize a tensor is to run the operators that its values depend on, in their order. Materializing a
// whole module right after torch::manual_seed(s) gives bit for bit the values of building it right after
// torch::manual_seed(s). A part that is materialized alone draws random numbers for that part only; use
// random.h for values that must not depend on the order.
//
// Parameters keep their identity: handles in modules, containers and optimizers refer to the materialized
// tensor. Tied parameters stay tied, also if the parts are materialized one after another.
//
// A DeferredInit keeps what it materialized alive until it is destroyed; destroy it when the module is
// complete.
//
// Thread safety: one thread at a time.

// Makes every tensor created in its scope fake and records how to initialize it. See ModeGuard.
class DeferredInit final : public Mode {
 public:
  // Without a record.
  DeferredInit() = default;
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

  // Runs the operator on fake tensors and records it.
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  // Materializes every fake parameter and buffer of a module and its submodules, on `device` (default: the
  // device on which each was created). Throws StateError for a fake tensor that was not created under this
  // mode.
  void materialize(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);
  // Materializes these tensors in place; tensors that are not fake are left unchanged. Throws as above.
  void materialize(const std::vector<at::Tensor>& tensors, std::optional<at::Device> device = std::nullopt);

  // Returns those of the tensors to which `materialize` would give the values of a real run. They depend only
  // on recorded operators that draw no random numbers, and on real tensors that no operator under this mode
  // would have written and that are still held outside of the record. A real tensor that nothing else holds
  // was replaced by what was computed from it (`count = count + 1`), and a real run must find it unchanged.
  std::vector<at::Tensor> replayable(const std::vector<at::Tensor>& tensors) const;

  // Number of operators in the record.
  std::size_t recorded_operators() const { return steps_.size(); }

 private:
  // An operator as it was called. Holds copies of the fake tensors, because those in the module will change.
  struct Step {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments, results;
  };

  class Holders;
  std::vector<bool> steps_needed(const std::vector<at::Tensor>& tensors) const;
  void replay(std::size_t step);
  at::Tensor real_of(const at::Tensor& tensor) const;

  FakeMode fake_;
  std::vector<Step> steps_;
  std::vector<bool> replayed_;
  std::unordered_map<const void*, at::Tensor> real_;  // by the payload of the fake tensor
  std::unordered_set<const void*> stale_;             // memory that a real run would have written
};

// Allocates every fake parameter and buffer of a module without initializing it, whatever made them fake, on
// `device` (default: the device of each). For modules whose values are then read from a checkpoint.
void materialize_empty(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);

}  // namespace penstock
