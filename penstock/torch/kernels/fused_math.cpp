#include "penstock/torch/kernels/fused_math.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/kernels/fused_math_kernels.h"

namespace penstock {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool fits(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.numel() > 0 && (!is_wrapper(tensor) || is_fake(tensor)) &&
         detail::has_fused_math(tensor);
}

// ---- operators: contiguous tensors on one device. On the meta device they compute the shape only ----

bool computes(const at::Tensor& tensor) { return !tensor.is_meta(); }

std::tuple<at::Tensor, at::Tensor> cross_entropy_rows(const at::Tensor& logits, const at::Tensor& targets,
                                                      std::int64_t ignored) {
  at::Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat)),
             log_sums = at::empty_like(losses);
  if (computes(logits)) detail::launch_cross_entropy(logits, targets, ignored, losses, log_sums);
  return {losses, log_sums};
}
at::Tensor cross_entropy_rows_backward(const at::Tensor& logits, const at::Tensor& targets,
                                       std::int64_t ignored, const at::Tensor& log_sums,
                                       const at::Tensor& scale) {
  at::Tensor result = at::empty_like(logits);
  if (computes(logits))
    detail::launch_cross_entropy_backward(logits, targets, ignored, log_sums, scale, result);
  return result;
}
at::Tensor rotate_pairs_by(const at::Tensor& x, const at::Tensor& turns, bool back) {
  at::Tensor result = at::empty_like(x);
  if (computes(x)) detail::launch_rotate_pairs(x, turns, back, result);
  return result;
}
// gate and up: rows [n, width], contiguous within a row.
at::Tensor silu_product_forward(const at::Tensor& gate, const at::Tensor& up) {
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  if (computes(gate)) detail::launch_silu_product(gate, up, result);
  return result;
}
std::tuple<at::Tensor, at::Tensor> silu_product_backward(const at::Tensor& gate, const at::Tensor& up,
                                                         const at::Tensor& gradient) {
  at::Tensor gate_gradient = at::empty(gate.sizes(), gate.options()),
             up_gradient = at::empty(up.sizes(), up.options());
  if (computes(gate)) detail::launch_silu_product_backward(gate, up, gradient, gate_gradient, up_gradient);
  return {gate_gradient, up_gradient};
}
// joint: [n, 2 * width], contiguous.
at::Tensor silu_halves_forward(const at::Tensor& joint) {
  const std::int64_t width = joint.size(1) / 2;
  return silu_product_forward(joint.narrow(1, 0, width), joint.narrow(1, width, width));
}
at::Tensor silu_halves_backward(const at::Tensor& joint, const at::Tensor& gradient) {
  const std::int64_t width = joint.size(1) / 2;
  at::Tensor result = at::empty(joint.sizes(), joint.options());
  if (computes(joint))
    detail::launch_silu_product_backward(joint.narrow(1, 0, width), joint.narrow(1, width, width), gradient,
                                         result.narrow(1, 0, width), result.narrow(1, width, width));
  return result;
}

// Through the dispatcher, so that modes see them.
template <class Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// ---- their derivatives ----

struct CrossEntropySum : torch::autograd::Function<CrossEntropySum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            std::int64_t ignored) {
    static const auto op = operator_named<decltype(cross_entropy_rows)>("penstock::cross_entropy_rows");
    note_history(context, {logits});
    const at::Tensor rows = logits.contiguous(), wanted = targets.contiguous();
    const auto [losses, log_sums] = op.call(rows, wanted, ignored);
    context->save_for_backward({rows, wanted, log_sums});
    context->saved_data["ignored"] = ignored;
    return losses.sum();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        operator_named<decltype(cross_entropy_rows_backward)>("penstock::cross_entropy_rows_backward");
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::cross_entropy_rows", gradients, [&] {
      return variable_list{op.call(saved[0], saved[1], context->saved_data["ignored"].toInt(), saved[2],
                                   gradients[0].to(at::kFloat).contiguous()),
                           at::Tensor(), at::Tensor()};
    });
  }
};

struct RotatePairs : torch::autograd::Function<RotatePairs> {
  static at::Tensor rotated(const at::Tensor& x, const at::Tensor& numbers, bool back) {
    static const auto op = operator_named<decltype(rotate_pairs_by)>("penstock::rotate_pairs");
    return op.call(x.contiguous(), numbers, back);
  }
  // `numbers`: the turns as pairs of real numbers, without a gradient.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& numbers,
                            bool back) {
    context->save_for_backward({numbers});
    context->saved_data["back"] = back;
    return rotated(x, numbers, back);
  }
  // Linear: a rotation back, which can be differentiated like this one.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor numbers = context->get_saved_variables()[0];
    const bool back = !context->saved_data["back"].toBool();
    return {c10::GradMode::is_enabled() ? RotatePairs::apply(gradients[0], numbers, back)
                                        : rotated(gradients[0], numbers, back),
            at::Tensor(), at::Tensor()};
  }
};

// As rows that are contiguous; a copy only if they are not.
at::Tensor rows_of(const at::Tensor& x) {
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 ? rows : rows.contiguous();
}

struct SiluProduct : torch::autograd::Function<SiluProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    static const auto op = operator_named<decltype(silu_product_forward)>("penstock::silu_product");
    note_history(context, {gate, up});
    context->set_materialize_grads(false);
    const at::Tensor a = rows_of(gate), b = rows_of(up);
    context->save_for_backward({a, b});
    context->saved_data["sizes"] = gate.sizes().vec();
    const at::Tensor result = op.call(a, b);
    return gate.dim() == 2 ? result : result.view(gate.sizes());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = operator_named<decltype(silu_product_backward)>("penstock::silu_product_backward");
    if (!gradients[0].defined()) return variable_list(2);
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::silu_product", gradients, [&] {
      const auto [gate, up] =
          op.call(saved[0], saved[1], gradients[0].reshape(saved[0].sizes()).contiguous());
      const std::vector<std::int64_t> sizes = context->saved_data["sizes"].toIntVector();
      return variable_list{gate.view(sizes), up.view(sizes)};
    });
  }
};

struct SiluHalves : torch::autograd::Function<SiluHalves> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given) {
    static const auto op = operator_named<decltype(silu_halves_forward)>("penstock::silu_halves");
    note_history(context, {given});
    context->set_materialize_grads(false);
    const at::Tensor joint = given.contiguous();
    context->save_for_backward({joint});
    return op.call(joint);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = operator_named<decltype(silu_halves_backward)>("penstock::silu_halves_backward");
    if (!gradients[0].defined()) return variable_list(1);
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::silu_halves", gradients,
                               [&] { return variable_list{op.call(saved[0], gradients[0].contiguous())}; });
  }
};

// By LibTorch's operators. Keeps its inputs alone, where they would keep silu(gate) as well.
struct LeanSiluProduct : torch::autograd::Function<LeanSiluProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->set_materialize_grads(false);
    context->save_for_backward({gate, up});
    return at::mul(at::silu(gate), up);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(2);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &gradient = gradients[0];
    return {silu_gradient(at::mul(gradient, up), gate), at::mul(gradient, at::silu(gate))};
  }
  static at::Tensor silu_gradient(const at::Tensor& gradient, const at::Tensor& x) {
    // LibTorch's operator has no derivative of its own in every version.
    if (!at::GradMode::is_enabled()) return at::silu_backward(gradient, x);
    const at::Tensor share = at::sigmoid(x);
    return gradient * (share * (1 + x * (1 - share)));
  }
};

void add_operators(torch::Library& library) {
  library.impl("cross_entropy_rows", &cross_entropy_rows);
  library.impl("cross_entropy_rows_backward", &cross_entropy_rows_backward);
  library.impl("rotate_pairs", &rotate_pairs_by);
  library.impl("silu_product", &silu_product_forward);
  library.impl("silu_product_backward", &silu_product_backward);
  library.impl("silu_halves", &silu_halves_forward);
  library.impl("silu_halves_backward", &silu_halves_backward);
}

std::string gate_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return fmt::format("[{}] of {}", fmt::join(tensor.sizes(), ", "), c10::toString(tensor.scalar_type()));
}

at::Tensor silu_product_by_operators(const at::Tensor& gate, const at::Tensor& up) {
  // Its gradients have no broadcast and no promotion.
  const bool alike = gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type();
  return alike ? LeanSiluProduct::apply(gate, up) : at::mul(at::silu(gate), up);
}

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored) {
  if (fits(logits) && logits.dim() == 2 && targets.dim() == 1 && targets.scalar_type() == at::kLong &&
      targets.device() == logits.device())
    return CrossEntropySum::apply(logits, targets, ignored);
  const auto dtype = logits.scalar_type();
  const at::Tensor wide = dtype == at::kHalf || dtype == at::kBFloat16 ? logits.to(at::kFloat) : logits;
  return at::cross_entropy_loss(wide, targets, {}, at::Reduction::Sum, ignored);
}

at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& turns) {
  const bool of_row = turns.dim() == 3 && turns.size(0) == x.size(1) && turns.size(1) == 1;
  const bool of_rows =
      turns.dim() == 4 && turns.size(0) == x.size(0) && turns.size(1) == x.size(1) && turns.size(2) == 1;
  if (fits(x) && x.dim() == 4 && (of_row || of_rows) && 2 * turns.size(-1) == x.size(3) &&
      turns.scalar_type() == at::kComplexFloat && turns.device() == x.device() &&
      !(c10::GradMode::is_enabled() && turns.requires_grad()))
    return RotatePairs::apply(x, at::view_as_real(turns).contiguous(), false);
  const at::ScalarType dtype = turns.scalar_type() == at::kComplexDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = x.to(dtype);
  // A shard that starts in the middle of a pair in memory cannot be viewed as complex numbers.
  const at::Tensor points =
      at::view_as_complex((wide.storage_offset() % 2 == 0 ? wide : wide.clone())
                              .view({x.size(0), x.size(1), x.size(2), x.size(3) / 2, 2}));
  return at::view_as_real(points * turns).view(x.sizes()).to(x.scalar_type());
}

at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& up) {
  if (!gate.defined() || !up.defined())
    throw ValueError(describe("silu_product: gate and up",
                              fmt::format("{} and {}", gate_text(gate), gate_text(up)), "two tensors"));
  if (fits(gate) && fits(up) && gate.dim() > 0 && gate.sizes() == up.sizes() &&
      gate.scalar_type() == up.scalar_type() && gate.device() == up.device())
    return SiluProduct::apply(gate, up);
  return silu_product_by_operators(gate, up);
}

at::Tensor silu_halves(const at::Tensor& joint) {
  // The last element of an odd row would belong to neither half.
  if (!joint.defined() || joint.dim() == 0 || joint.size(-1) % 2 != 0)
    throw ValueError(
        describe("silu_halves: rows", gate_text(joint), "a tensor whose last dim has an even size"));
  if (fits(joint) && joint.dim() == 2) return SiluHalves::apply(joint);
  const std::int64_t width = joint.size(-1) / 2;
  return silu_product_by_operators(joint.narrow(-1, 0, width), joint.narrow(-1, width, width));
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("cross_entropy_rows(Tensor logits, Tensor targets, int ignored) -> (Tensor, Tensor)");
  library.def(
      "cross_entropy_rows_backward(Tensor logits, Tensor targets, int ignored, Tensor log_sums, Tensor "
      "scale) -> Tensor");
  library.def("rotate_pairs(Tensor x, Tensor turns, bool back) -> Tensor");
  library.def("silu_product(Tensor gate, Tensor up) -> Tensor");
  library.def("silu_product_backward(Tensor gate, Tensor up, Tensor gradient) -> (Tensor, Tensor)");
  library.def("silu_halves(Tensor joint) -> Tensor");
  library.def("silu_halves_backward(Tensor joint, Tensor gradient) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) { add_operators(library); }
TORCH_LIBRARY_IMPL(penstock, Meta, library) { add_operators(library); }

}  // namespace penstock
