#include "penstock/torch/dispatch/gradient_sink.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"

namespace penstock {
namespace {

using torch::autograd::variable_list;

// Passes the gradient to the sink and an undefined one to the accumulator, which then does nothing.
struct SinkHook final : torch::autograd::FunctionPreHook {
  SinkHook(torch::autograd::Node* node, GradientSink& sink, std::size_t slot)
      : node(node), sink(&sink), slot(slot) {}

  variable_list operator()(const variable_list& gradients) override {
    at::Tensor gradient = gradients.at(0);
    if (!gradient.defined()) return gradients;
#if !PENSTOCK_TORCH_AT_LEAST(2, 0)
    // In this version the accumulator itself calls the hooks of its leaf, which would be too late.
    gradient = torch::autograd::AccumulateGrad::callHooks(
        static_cast<torch::autograd::AccumulateGrad*>(node)->variable, gradient);
#endif
    if (gradient.defined() && gradient.requires_grad())
      throw NotImplemented(
          describe("backward: the gradient of a parameter that its owner keeps elsewhere (sharded, or "
                   "reduced over ranks)",
                   "recorded (create_graph), which would be lost", "a backward without create_graph",
                   "differentiate with torch::autograd::grad with respect to other tensors, or do not shard "
                   "the module"));
    if (gradient.defined()) sink->take(slot, std::move(gradient));
    return {at::Tensor()};
  }

  torch::autograd::Node* node;
  GradientSink* sink;
  std::size_t slot;
};

}  // namespace

AccumulatorPtr send_gradient_to(const at::Tensor& leaf, GradientSink& sink, std::size_t slot) {
  AccumulatorPtr accumulator = torch::autograd::impl::grad_accumulator(leaf);
  PENSTOCK_INVARIANT(accumulator, "a leaf that requires gradients has an accumulator");
  for (const auto& hook : accumulator->pre_hooks())
    if (dynamic_cast<const SinkHook*>(hook.get()) != nullptr) return accumulator;
  accumulator->add_pre_hook(std::make_unique<SinkHook>(&*accumulator, sink, slot));
  return accumulator;
}

bool awaits_gradient(const at::Tensor& leaf) {
  return static_cast<bool>(torch::autograd::impl::try_get_grad_accumulator(leaf));
}

bool in_backward() { return torch::autograd::get_current_graph_task_exec_info() != nullptr; }

void at_end_of_backward(std::function<void()> callback) {
  if (!in_backward()) throw StateError("at_end_of_backward: no backward is running on this thread");
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace penstock
