// The loss of one microbatch: a function of the last stage's result and the target.
//
//   PipelineLoss mean([](at::Tensor output, at::Tensor target) { return torch::mse_loss(output, target); });
//   PipelineLoss two([](const Tree& output, const Tree& target) { return loss_of(output[0].tensor(), output[1].tensor(), target["y"].tensor()); });
#pragma once

#include <concepts>
#include <functional>
#include <utility>

#include "penstock/stage_module.h"

namespace penstock {

class PipelineLoss {
 public:
  PipelineLoss() = default;  // no loss: the pipeline only runs forward
  template <class Callable>
    requires(!std::derived_from<std::decay_t<Callable>, PipelineLoss> && !std::is_null_pointer_v<Callable>)
  PipelineLoss(Callable function) : function_(wrap(std::move(function))) {}

  explicit operator bool() const { return static_cast<bool>(function_); }
  at::Tensor operator()(const Tree& output, const Tree& target) const { return function_(output, target); }

 private:
  using Function = std::function<at::Tensor(const Tree&, const Tree&)>;

  template <class Parameters, class Callable>
  static Function wrap_with(Callable function) {
    static_assert(Parameters::kCount == 2, "a loss takes the output and the target");
    return [function = std::move(function)](const Tree& output, const Tree& target) -> at::Tensor {
      return function(detail::argument_as<typename Parameters::template At<0>>(output), detail::argument_as<typename Parameters::template At<1>>(target));
    };
  }
  template <class Callable>
  static Function wrap(Callable function) {
    if constexpr (std::is_pointer_v<Callable>) {
      return wrap_with<detail::ParametersOf<Callable>>(function);
    } else {
      return wrap_with<detail::ParametersOf<decltype(&Callable::operator())>>(std::move(function));
    }
  }

  Function function_;
};

}  // namespace penstock
