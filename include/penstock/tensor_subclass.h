// Tensor subclasses in C++: a tensor that carries an object of yours, which then handles every operator on it.
//
//   class Logged final : public penstock::Payload {                 // a tensor that tells what is done to it
//    public:
//     static constexpr std::string_view kKind = "Logged";
//     explicit Logged(at::Tensor inner) : inner(std::move(inner)) {}
//     static at::Tensor make(const at::Tensor& inner, const at::Tensor* viewed = nullptr) {
//       return penstock::make_wrapper_like(c10::make_intrusive<Logged>(inner), inner, viewed);
//     }
//     std::string_view kind() const override { return kKind; }
//     void dispatch(const c10::OperatorHandle& op, penstock::Stack* stack) override {
//       std::cout << op.operator_name() << "\n";
//       penstock::WrapperCall<Logged> call(op, stack);                // takes the arguments,
//       const penstock::Stack results = call.run([](const Logged& logged) { return logged.inner; });  // calls the operator,
//       call.finish(results, [](const at::Tensor& inner, penstock::ResultPlace, const at::Tensor* viewed) {
//         return make(inner, viewed);                                 // and wraps what is new; in place, the argument itself
//       });
//     }
//     at::Tensor inner;
//   };
//   at::Tensor x = Logged::make(torch::ones({3}));
//   x.set_requires_grad(true);
//   (x * 2).sum().backward();                                         // autograd is none the wiser; x.grad() is Logged too
//
// A guide with larger examples: docs/subclasses.md.
//
// How it works. The wrapper is a TensorImpl with sizes, strides, dtype and device but no memory. Operators on it run
// through autocast and autograd as usual and then, in place of a CPU or CUDA kernel, call `dispatch` of the payload. So
// a payload never sees autograd: what it computes is the forward of one operator, and gradients come back as further
// operators. Gradients, saved values, views, detached and swapped copies are wrappers too.
//
// A handler gets the arguments on top of `stack` (as many as the schema has) and leaves the results in their place. It
// must leave exactly as many as the schema returns; anything else is a TypeError that names the operator. For an in-place
// or out= operator the result must be the argument itself. WrapperCall (penstock/torch/dispatch/wrapper_call.h) does all this for
// payloads that hold tensors of the wrapper's shape.
//
// With payloads of several kinds in one call, the kind with the highest `priority` handles it, and among equals the first.
// Wrappers nest: an inner tensor may be a wrapper.
// Thread rule: as for tensors. `dispatch` may be called by autograd's worker threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "penstock/operator_traits.h"
#include "penstock/stack_tensors.h"

namespace penstock {

// A wrapper taken apart: its inner tensors by name and everything else as a value.
struct FlatWrapper;
struct WrapperGeometry;

class Payload : public c10::intrusive_ptr_target {
 public:
  // The operator's arguments lie on top of the stack; their place is taken by the results.
  virtual void dispatch(const c10::OperatorHandle& op, Stack* stack) = 0;

  // The name of the subclass, for errors and for unflatten: unique in a process.
  virtual std::string_view kind() const = 0;

  // Who handles a call that mixes kinds: the highest.
  virtual int priority() const { return 0; }

  // Inner tensors by name, and the rest as a value that compares with ==. Optional: the default throws NotImplemented.
  virtual std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const;
  virtual c10::IValue context() const { return {}; }

  // ---- what a captured graph asks (graph/subclass_record.h) ----

  // A wrapper of this kind and context around other inner tensors, given in the order of inner_tensors(). Default: unflatten_wrapper.
  virtual at::Tensor rebuild(const std::vector<at::Tensor>& inner, const WrapperGeometry& geometry) const;
  // The same for a gradient of such a wrapper, where that is laid out in another way.
  virtual at::Tensor rebuild_gradient(const std::vector<at::Tensor>& inner, const WrapperGeometry& geometry) const;
  // Whether a payload differs from this one in its inner tensors only. Default: of one class, with equal contexts.
  virtual bool same_context(const Payload& other) const;
  // `self`, which carries this payload, with the context of another of its kind; undefined where that cannot be.
  virtual at::Tensor with_context_of(const at::Tensor& self, const Payload& other) const;

  // For a handler that does not know `op`: a TypeError that names the operator, the subclass and the remedy.
  [[noreturn]] void refuse(const c10::OperatorHandle& op, std::string_view remedy = {}) const;
};

using PayloadPtr = c10::intrusive_ptr<Payload>;

// What a wrapper shows to the outside.
struct WrapperGeometry {
  c10::SmallVector<std::int64_t, 5> sizes, strides;
  std::int64_t storage_offset = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool wrapped_number = false;  // a number that became a tensor: takes part in type promotion as a number

  bool operator==(const WrapperGeometry&) const = default;
};

WrapperGeometry geometry_of(const at::Tensor& tensor);

// `viewed`: the wrapper that this one is a view of, if it is. Both then share one storage object (never memory: there is
// none), so that is_alias_of holds, and a view taken in InferenceMode is as differentiable as what it views.
at::Tensor make_wrapper(PayloadPtr payload, const WrapperGeometry& geometry, const at::Tensor* viewed = nullptr);
// With the geometry of `like`.
at::Tensor make_wrapper_like(PayloadPtr payload, const at::Tensor& like, const at::Tensor* viewed = nullptr);

// The payload of a wrapper; null for other tensors.
Payload* payload_of(const at::Tensor& tensor);
inline bool is_wrapper(const at::Tensor& tensor) { return payload_of(tensor) != nullptr; }

// The payload when it is exactly of type P, else null. P is a final class.
template <class P>
P* payload_as(const at::Tensor& tensor) {
  Payload* payload = payload_of(tensor);
  return payload && typeid(*payload) == typeid(P) ? static_cast<P*>(payload) : nullptr;
}

// After the inner tensor changed its shape in place (transpose_, resize_, set_): the wrapper follows.
void sync_geometry(const at::Tensor& wrapper, const at::Tensor& inner);
// The same for payloads whose inner tensors have another shape than the wrapper.
void sync_geometry(const at::Tensor& wrapper, at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t storage_offset);

// Makes `self`, through every handle to it, what `other` is: a plain tensor becomes a wrapper, a wrapper plain, memory moves
// to another device. What at::Tensor::set_data does among tensors of one kind. So a parameter that modules and optimizers
// hold by handle changes for all of them. requires_grad, grad and hooks of `self` stay; `self` must be a leaf or not need
// gradients. Throws TypeError for tensors it cannot change (sparse, quantized, subclasses of TensorImpl by others).
void replace_data(const at::Tensor& self, const at::Tensor& other);

// ---- flatten and unflatten ----

struct FlatWrapper {
  std::string kind;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  c10::IValue context;
  WrapperGeometry geometry;
};

// Throws TypeError for a tensor that is not a wrapper, NotImplemented when its payload has no inner_tensors().
FlatWrapper flatten_wrapper(const at::Tensor& wrapper);

// Rebuilds a wrapper of a registered kind. The inner tensors may differ from those flattened, in number of elements too.
at::Tensor unflatten_wrapper(const FlatWrapper& flat);

using UnflattenFunction = std::function<at::Tensor(const FlatWrapper&)>;
// Once per kind; a second registration of a kind throws StateError.
void register_wrapper_kind(const std::string& kind, UnflattenFunction unflatten);

// ---- for handlers ----

// Replaces every tensor among the arguments on top of the stack.
template <class Map>
void map_arguments(const c10::OperatorHandle& op, Stack* stack, Map&& map) {
  const std::size_t count = op.schema().arguments().size();
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = map(static_cast<const at::Tensor&>(value.toTensor()));
    } else if (value.isList()) {
      value = map_tensors(value, map);
    }
  }
}

// Switches wrappers and modes off: a wrapper that meets an operator then is an error of the kernel it reaches. For code
// that must reach the kernels below, like allocation inside a handler.
class BelowWrappersGuard {
 public:
  BelowWrappersGuard();

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

// ---- one operator call ----
//
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
