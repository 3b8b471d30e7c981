// Your own step around a captured module: it changes the arguments before they reach the graph, and the
// results after it.
//
//   struct InDouble final : graph::ValueWrapper {
//     std::string name() const override { return "in double"; }
//     at::Tensor input(const std::string&, const at::Tensor& tensor) const override {
//       return tensor.is_floating_point() ? tensor.to(at::kDouble) : tensor;
//     }
//     at::Tensor result(std::size_t, const at::Tensor& tensor) const override {
//       return tensor.scalar_type() == at::kDouble ? tensor.to(at::kFloat) : tensor;
//     }
//   };
//   torch::nn::Sequential net(torch::nn::Linear(4, 8));
//   net->to(at::kDouble);
//   auto fast = graph::compile(net, {.wrappers = {std::make_shared<InDouble>()}});
//   fast->forward(torch::randn({2, 4}));
//   fast->wrappers();              // "in double: replaces args[0]", ..., "epilogue: writes no input"
//
// What a wrapper does is differentiated as usual. The module is captured for what its wrappers make of the
// arguments. With several wrappers, arguments pass them in the order of the list, results in reverse order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

namespace penstock::graph {

// Changes tensors on their way into a captured function and out of it. It must do the same in each call of
// the same kind. Thread safety: that of the compiled module that uses it.
class ValueWrapper {
 public:
  // May be deleted through this class.
  virtual ~ValueWrapper() = default;
  // For messages and CompiledModuleBase::wrappers().
  virtual std::string name() const = 0;
  // Returns what the function gets instead of an argument. Not called for parameters and buffers, and for
  // what is not a tensor. Replacing an argument that the function writes is an error (NotImplemented) when it
  // is captured.
  virtual at::Tensor input(const std::string& /*name*/, const at::Tensor& tensor) const { return tensor; }
  // Returns what the caller gets instead of a result. Not called for what is not a tensor.
  virtual at::Tensor result(std::size_t /*index*/, const at::Tensor& tensor) const { return tensor; }
};

}  // namespace penstock::graph
