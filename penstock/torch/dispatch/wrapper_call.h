// One operator call on wrappers whose inner tensors have the wrapper's shape: runs the inner calls and wraps
// the results.
//
//   void Two::dispatch(const c10::OperatorHandle& op, Stack* stack) {
//     WrapperCall<Two> call(op, stack);
//     const Stack a = call.run([](const Two& two) { return two.a; });      // the operator on the first inner tensors
//     const Stack b = call.run([](const Two& two) { return two.b; });      // and on the second ones
//     call.finish(a, [&](const at::Tensor& inner, ResultPlace place, const at::Tensor* viewed) {
//       return make_wrapper_like(c10::make_intrusive<Two>(inner, tensor_at(b, place)), inner, viewed);
//     });
//   }
//
// Results that are an argument (in-place, out=) are returned as that argument, with updated geometry; views
// share the storage object of their base; numbers and other values are passed through. Tensors that are not
// wrappers of P are passed to the inner calls unchanged, but writing them throws TypeError: a plain tensor
// cannot hold what a wrapper holds.
#pragma once

#include "penstock/torch/dispatch/operator_traits.h"
#include "penstock/tensor_subclass.h"

namespace penstock {

// Identifies a result, and the element if it is a list (-1 otherwise).
struct ResultPlace {
  std::size_t result = 0;
  int element = -1;
};

inline at::Tensor tensor_at(const Stack& results, ResultPlace place) {
  const c10::IValue& value = results[place.result];
  return place.element < 0 ? value.toTensor() : value.toListRef()[static_cast<std::size_t>(place.element)].toTensor();
}

namespace detail {
[[noreturn]] void refuse_plain_write(const OperatorTraits& traits, std::size_t argument, std::string_view kind);
}

template <class P>
class WrapperCall {
 public:
  // Pops the arguments off the stack.
  WrapperCall(const c10::OperatorHandle& op, Stack* stack) : op_(op), traits_(traits_of(op)), stack_(stack) {
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(traits_.arguments.size());
    arguments_.assign(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
    stack->erase(first, stack->end());
    if (traits_.mutates) check_writes();
  }

  const OperatorTraits& traits() const { return traits_; }
  const std::vector<c10::IValue>& arguments() const { return arguments_; }

  // Calls the operator with every wrapper of P replaced by `inner(payload)`.
  template <class Inner>
  Stack run(Inner&& inner) const {
    Stack inner_stack;
    inner_stack.reserve(std::max(arguments_.size(), traits_.returns.size()));
    const auto map = [&](const at::Tensor& tensor) -> at::Tensor {
      const P* payload = payload_as<P>(tensor);
      return payload ? at::Tensor(inner(*payload)) : tensor;
    };
    for (const c10::IValue& value : arguments_)
      inner_stack.push_back(value.isTensor() || value.isList() ? map_tensors(value, map) : value);
    op_.callBoxed(&inner_stack);
    return inner_stack;
  }

  // Pushes the results: `wrap(inner, place, viewed)` returns the wrapper for a tensor in `inner_results`;
  // `viewed` is the argument that it is a view of, or null.
  template <class Wrap>
  void finish(const Stack& inner_results, Wrap&& wrap) {
    for (std::size_t i = 0; i < traits_.returns.size(); ++i) {
      const ReturnAlias& source = traits_.returns[i];
      const c10::IValue& value = inner_results[i];
      if (source.kind == ReturnAlias::Kind::Same) {
        const c10::IValue& argument = arguments_[static_cast<std::size_t>(source.argument)];
        if (argument.isTensor() && value.isTensor() && value.toTensor().defined()) sync_geometry(argument.toTensor(), value.toTensor());
        stack_->push_back(argument);
        continue;
      }
      const at::Tensor* viewed = nullptr;
      if (source.kind == ReturnAlias::Kind::View) {
        const c10::IValue& argument = arguments_[static_cast<std::size_t>(source.argument)];
        if (argument.isTensor() && payload_as<P>(argument.toTensor())) viewed = &argument.toTensor();
      }
      int element = value.isTensor() ? -1 : 0;
      stack_->push_back(map_tensors(value, [&](const at::Tensor& inner) {
        return wrap(inner, ResultPlace{i, element < 0 ? -1 : element++}, viewed);
      }));
    }
  }

 private:
  void check_writes() const {
    for (std::size_t i = 0; i < arguments_.size(); ++i)
      if (traits_.arguments[i].written)
        for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
          if (!payload_as<P>(tensor)) detail::refuse_plain_write(traits_, i, P::kKind);
        });
  }

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  Stack* stack_;
  std::vector<c10::IValue> arguments_;
};

}  // namespace penstock
