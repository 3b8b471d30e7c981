// Tensor subclasses in C++: a tensor that carries an object of your class, which handles every operator on
// it.
//
//   class Logged final : public Payload {                   // prints the operators called on it
//    public:
//     static constexpr std::string_view kKind = "Logged";
//     explicit Logged(at::Tensor tensor) : inner(std::move(tensor)) {}
//     static at::Tensor make(const at::Tensor& inner, const at::Tensor* viewed = nullptr) {
//       return make_wrapper_like(c10::make_intrusive<Logged>(inner), inner, viewed);
//     }
//     std::string_view kind() const override { return kKind; }
//     void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
//       std::cout << op.operator_name() << "\n";
//       WrapperCall<Logged> call(op, stack);                        // takes the arguments from the stack
//       const Stack results = call.run([](const Logged& logged) { return logged.inner; });
//       call.finish(results, [](const at::Tensor& inner, ResultPlace, const at::Tensor* viewed) {
//         return make(inner, viewed);                               // wraps the new results
//       });
//     }
//     at::Tensor inner;
//   };
//   at::Tensor logged = Logged::make(torch::ones({3}));
//   logged.set_requires_grad(true);
//   (logged * 2).sum().backward();                                  // logged.grad() is a Logged too
//
// docs/subclasses.md is a guide with larger examples.
//
// A wrapper is a tensor with sizes, strides, dtype and device, but without memory. Operators on it pass
// through autocast and autograd as usual and then call `dispatch` of its payload instead of a CPU or CUDA
// kernel. A payload therefore does not deal with autograd: it computes the forward of one operator, and
// gradients arrive as further operators. Gradients, saved values, views and detached copies of a wrapper are
// wrappers too.
//
// A handler finds the arguments on top of the stack, as many as the schema has, and replaces them with the
// results, as many as the schema returns; any other number is a TypeError that names the operator. The result
// of an in-place or out= operator must be the argument itself. WrapperCall does all this for payloads whose
// inner tensors have the shape of the wrapper.
//
// If the arguments of a call have payloads of several kinds, the kind with the highest priority handles the
// call; among equals, that of the first argument. Wrappers nest: an inner tensor may be a wrapper.
//
// Thread safety: as for tensors. `dispatch` may be called by autograd's worker threads.
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

namespace penstock {

struct FlatWrapper;
struct WrapperGeometry;

// What a wrapper carries: the base class of tensor subclasses.
class Payload : public c10::intrusive_ptr_target {
 public:
  // Handles one operator. Its arguments are on top of the stack; the handler replaces them with the results.
  virtual void dispatch(const c10::OperatorHandle& op, Stack* stack) = 0;

  // Name of the subclass, for errors and unflatten_wrapper. Unique in a process.
  virtual std::string_view kind() const = 0;

  // In a call with payloads of several kinds, the highest priority handles it. Default: 0.
  virtual int priority() const { return 0; }

  // Returns the inner tensors by name. Optional; the default throws NotImplemented.
  virtual std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const;
  // Returns everything but the inner tensors as a value that can be compared with ==. Default: None.
  virtual c10::IValue context() const { return {}; }

  // ---- used by captured graphs ----

  // Returns a wrapper of this kind and context around other inner tensors, given in the order of
  // inner_tensors(). Default: unflatten_wrapper.
  virtual at::Tensor rebuild(const std::vector<at::Tensor>& inner, const WrapperGeometry& geometry) const;
  // As rebuild, for a gradient of such a wrapper. Override it if gradients are laid out differently.
  virtual at::Tensor rebuild_gradient(const std::vector<at::Tensor>& inner,
                                      const WrapperGeometry& geometry) const;
  // Returns whether another payload differs from this one in its inner tensors only. Default: whether it is
  // of the same class and has an equal context.
  virtual bool same_context(const Payload& other) const;
  // Returns `self`, which carries this payload, converted to the context of `other`, a payload of the same
  // kind. Returns an undefined tensor if that is impossible.
  virtual at::Tensor with_context_of(const at::Tensor& self, const Payload& other) const;

  // Throws a TypeError that names the operator, the subclass and the remedy, for handlers that do not support
  // `op`.
  [[noreturn]] void refuse(const c10::OperatorHandle& op, std::string_view remedy = {}) const;
};

// Shared ownership of a payload.
using PayloadPtr = c10::intrusive_ptr<Payload>;

// How the elements of a tensor are laid out in memory.
struct StridedLayout {
  c10::SmallVector<std::int64_t, 5> sizes;    // size of each dim
  c10::SmallVector<std::int64_t, 5> strides;  // stride of each dim, in elements
  std::int64_t storage_offset = 0;            // in elements

  // Whether all members are equal.
  bool operator==(const StridedLayout&) const = default;
};

// The metadata that a wrapper has as a tensor.
struct WrapperGeometry : StridedLayout {
  at::ScalarType dtype = at::kFloat;  // element type
  at::Device device = at::kCPU;       // reported device
  bool wrapped_number = false;        // converted from a number: is promoted like a number

  // Whether all members are equal.
  bool operator==(const WrapperGeometry&) const = default;
};

// Returns the geometry of any tensor.
WrapperGeometry geometry_of(const at::Tensor& tensor);

// Returns a wrapper that carries `payload`. `viewed` is the wrapper that this one is a view of, or null. A
// view shares the storage object of its base (which has no memory), so that is_alias_of holds, and a view
// taken in InferenceMode is as differentiable as its base.
at::Tensor make_wrapper(PayloadPtr payload, const WrapperGeometry& geometry,
                        const at::Tensor* viewed = nullptr);
// As make_wrapper, with the geometry of `like`.
at::Tensor make_wrapper_like(PayloadPtr payload, const at::Tensor& like, const at::Tensor* viewed = nullptr);

// Returns the payload of a wrapper, or null for other tensors.
Payload* payload_of(const at::Tensor& tensor);
// Returns whether a tensor is a wrapper.
inline bool is_wrapper(const at::Tensor& tensor) { return payload_of(tensor) != nullptr; }

// Returns the payload if its type is exactly P, a final class; else null.
template <class P>
P* payload_as(const at::Tensor& tensor) {
  Payload* payload = payload_of(tensor);
  return payload && typeid(*payload) == typeid(P) ? static_cast<P*>(payload) : nullptr;
}

// Updates the geometry of a wrapper after its inner tensor changed its shape in place (transpose_, resize_,
// set_).
void sync_geometry(const at::Tensor& wrapper, const at::Tensor& inner);
// As above, for payloads whose inner tensors do not have the shape of the wrapper.
void sync_geometry(const at::Tensor& wrapper, at::IntArrayRef sizes, at::IntArrayRef strides,
                   std::int64_t storage_offset);

// Turns `self` into what `other` is, for every handle to it: a plain tensor becomes a wrapper, a wrapper a
// plain tensor, or memory moves to another device. This is what at::Tensor::set_data does between tensors of
// the same kind. A parameter that modules and optimizers hold by handle thus changes for all of them.
// requires_grad, grad and hooks of `self` are kept; `self` must be a leaf or not require grad. Throws
// TypeError for tensors that it cannot change (sparse, quantized, other subclasses of TensorImpl).
void replace_data(const at::Tensor& self, const at::Tensor& other);

// ---- flatten and unflatten ----

// A wrapper as its inner tensors and everything else as values.
struct FlatWrapper {
  std::string kind;                                         // Payload::kind
  std::vector<std::pair<std::string, at::Tensor>> tensors;  // Payload::inner_tensors
  c10::IValue context;                                      // Payload::context
  WrapperGeometry geometry;                                 // of the wrapper
};

// Returns the parts of a wrapper. Throws TypeError for a tensor that is not a wrapper, NotImplemented if its
// payload has no inner_tensors().
FlatWrapper flatten_wrapper(const at::Tensor& wrapper);

// Builds a wrapper of a registered kind. The inner tensors may differ from those that were flattened, also in
// number of elements.
at::Tensor unflatten_wrapper(const FlatWrapper& flat);

// Builds a wrapper of one kind from its parts.
using UnflattenFunction = std::function<at::Tensor(const FlatWrapper&)>;
// Sets the function that builds wrappers of a kind. Throws StateError if the kind is already registered.
void register_wrapper_kind(const std::string& kind, UnflattenFunction unflatten);

// ---- for handlers ----

// Replaces every defined tensor among the arguments on top of the stack by `map(tensor)`.
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

// Disables wrappers and modes for a scope, for code that must reach the kernels, such as allocation inside a
// handler. Operators must not be called on wrappers in it: they would reach a kernel that cannot handle them,
// which is an error.
class BelowWrappersGuard {
 public:
  // Disables wrappers and modes until the guard is destroyed.
  BelowWrappersGuard();

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

// ---- one operator call ----

// Identifies a tensor among the results of an operator.
struct ResultPlace {
  std::size_t result = 0;  // index of the result
  int element = -1;        // index in the result if it is a list, else -1
};

// Returns the result tensor at a place.
inline at::Tensor tensor_at(const Stack& results, ResultPlace place) {
  const c10::IValue& value = results[place.result];
  return place.element < 0 ? value.toTensor()
                           : value.toListRef()[static_cast<std::size_t>(place.element)].toTensor();
}

namespace detail {
[[noreturn]] void refuse_plain_write(const OperatorTraits& traits, std::size_t argument,
                                     std::string_view kind);
}

// One operator call on wrappers whose inner tensors have the shape of the wrapper: runs the operator on the
// inner tensors and wraps the results. P is the payload class and has a static member kKind.
//
//   void Two::dispatch(const c10::OperatorHandle& op, Stack* stack) {
//     WrapperCall<Two> call(op, stack);
//     const Stack a = call.run([](const Two& two) { return two.a; });      // on the first inner tensors
//     const Stack b = call.run([](const Two& two) { return two.b; });      // on the second ones
//     call.finish(a, [&](const at::Tensor& inner, ResultPlace place, const at::Tensor* viewed) {
//       return make_wrapper_like(c10::make_intrusive<Two>(inner, tensor_at(b, place)), inner, viewed);
//     });
//   }
//
// A result that is an argument (in-place, out=) is returned as that argument, with updated geometry. Views
// share the storage object of their base. Numbers and other values are passed through. Tensors that are not
// wrappers of P are passed to the inner calls unchanged; an operator that writes to one throws TypeError,
// because a plain tensor cannot hold what a wrapper holds.
template <class P>
class WrapperCall {
 public:
  // Takes the arguments from the stack.
  WrapperCall(const c10::OperatorHandle& op, Stack* stack) : op_(op), traits_(traits_of(op)), stack_(stack) {
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(traits_.arguments.size());
    arguments_.assign(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
    stack->erase(first, stack->end());
    if (traits_.mutates) check_writes();
  }

  // Facts about the operator.
  const OperatorTraits& traits() const { return traits_; }
  // The arguments of the call.
  const std::vector<c10::IValue>& arguments() const { return arguments_; }

  // Calls the operator with every wrapper of P replaced by `inner(payload)` and returns its results.
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

  // Pushes the results onto the stack. `wrap(inner, place, viewed)` is called for each new tensor in
  // `inner_results` and returns its wrapper; `viewed` is the argument that it is a view of, or null.
  template <class Wrap>
  void finish(const Stack& inner_results, Wrap&& wrap) {
    for (std::size_t i = 0; i < traits_.returns.size(); ++i) {
      const ReturnAlias& source = traits_.returns[i];
      const c10::IValue& value = inner_results[i];
      if (source.kind == ReturnAlias::Kind::Same) {
        const c10::IValue& argument = arguments_[static_cast<std::size_t>(source.argument)];
        if (argument.isTensor() && value.isTensor() && value.toTensor().defined())
          sync_geometry(argument.toTensor(), value.toTensor());
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
