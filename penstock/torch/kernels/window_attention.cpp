#include "penstock/torch/kernels/window_attention.h"

#include <ATen/ATen.h>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/dispatch/once_differentiable.h"

#if PENSTOCK_TORCH_AT_LEAST(2, 5)
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// ---- operators on [batch, length, heads, width]: the layout of the kernels ----

// Returns the result, the logarithms of the sums, and the two states of a random generator that is not used,
// which backward wants back.
FourTensors window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             std::int64_t window) {
  const auto [out, sums, state, unused, debug] = at::_flash_attention_forward(
      q, k, v, std::nullopt, std::nullopt, q.size(1), k.size(1), 0.0, false, false, std::optional<double>(),
      std::optional<std::int64_t>(window - 1), std::optional<std::int64_t>(0));
  return {out, sums, state, unused};
}
FourTensors window_attention_shape(const at::Tensor& q, const at::Tensor&, const at::Tensor&, std::int64_t) {
  return {at::empty(q.sizes(), q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat)),
          at::empty({2}, q.options().dtype(at::kUInt64)), at::empty({}, q.options().dtype(at::kUInt64))};
}
ThreeTensors window_attention_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& sums,
                                       const at::Tensor& state, const at::Tensor& unused,
                                       std::int64_t window) {
  return at::_flash_attention_backward(gradient, q, k, v, out, sums, at::Tensor(), at::Tensor(), q.size(1),
                                       k.size(1), 0.0, false, state, unused, std::optional<double>(),
                                       std::optional<std::int64_t>(window - 1),
                                       std::optional<std::int64_t>(0));
}
ThreeTensors window_attention_backward_shape(const at::Tensor&, const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const at::Tensor&, const at::Tensor&,
                                             const at::Tensor&, const at::Tensor&, std::int64_t) {
  return {at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
          at::empty(v.sizes(), v.options())};
}

template <class Signature>
auto window_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct WindowAttention : torch::autograd::Function<WindowAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, std::int64_t window) {
    static const auto op = window_operator<decltype(window_attention)>("penstock::window_attention");
    note_history(context, {q, k, v});
    const auto [out, sums, state, unused] = op.call(q, k, v, window);
    context->save_for_backward({q, k, v, out, sums, state, unused});
    context->saved_data["window"] = window;
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        window_operator<decltype(window_attention_backward)>("penstock::window_attention_backward");
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::window_attention", gradients, [&] {
      const auto [q, k, v] = op.call(gradients[0].contiguous(), saved[0], saved[1], saved[2], saved[3],
                                     saved[4], saved[5], saved[6], context->saved_data["window"].toInt());
      return variable_list{q, k, v, at::Tensor()};
    });
  }
};

// Kernels read whole vectors along the width.
at::Tensor lengths_outside(const at::Tensor& x) {
  const at::Tensor view = x.transpose(1, 2);
  return view.stride(3) == 1 ? view : view.contiguous();
}

}  // namespace

bool has_window_kernel(const at::Tensor& q, const at::Tensor& k) {
  const auto dtype = q.scalar_type();
  return q.is_cuda() && (dtype == at::kHalf || dtype == at::kBFloat16) && k.scalar_type() == dtype &&
         q.size(3) % 8 == 0 && q.size(3) <= 256 && q.numel() > 0 && (!is_wrapper(q) || is_fake(q)) &&
         detail::device_has_fused_attention(q);
}

at::Tensor attend_in_window(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::int64_t window) {
  return WindowAttention::apply(lengths_outside(q), lengths_outside(k), lengths_outside(v), window)
      .transpose(1, 2);
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def(
      "window_attention(Tensor q, Tensor k, Tensor v, int window) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "window_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
      "Tensor state, Tensor unused, int window) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("window_attention", &window_attention);
  library.impl("window_attention_backward", &window_attention_backward);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("window_attention", &window_attention_shape);
  library.impl("window_attention_backward", &window_attention_backward_shape);
}

}  // namespace penstock

#else

namespace penstock {

bool has_window_kernel(const at::Tensor&, const at::Tensor&) { return false; }

at::Tensor attend_in_window(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::int64_t) {
  throw StateError("attend_in_window: this LibTorch has no kernel for windows");
}

}  // namespace penstock

#endif
