// A user-defined activation checkpoint: forward results are not kept and are recomputed inside backward.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>

namespace penstock::test {

using Computation = std::function<at::Tensor(const at::Tensor&)>;

struct Recompute : torch::autograd::Function<Recompute> {
  struct Held : torch::CustomClassHolder {
    explicit Held(Computation compute) : compute(std::move(compute)) {}
    Computation compute;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<Held>& held) {
    context->save_for_backward({x});
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    return held->compute(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    const auto held = c10::static_intrusive_pointer_cast<Held>(context->saved_data["held"].toCapsule());
    at::Tensor y;
    {
      const at::AutoGradMode recording(true);
      y = held->compute(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

// `x` must require gradients, so that the computation gets a gradient.
inline at::Tensor recomputed(const at::Tensor& x, Computation compute) {
  return Recompute::apply(x, c10::make_intrusive<Recompute::Held>(std::move(compute)));
}

}  // namespace penstock::test
