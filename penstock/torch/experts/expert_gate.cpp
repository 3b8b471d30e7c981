#include "penstock/torch/experts/expert_gate.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/experts/expert_kernels.h"
#include "penstock/torch/experts/expert_rows_cpu.h"
#include "penstock/torch/experts/gate_tiles.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using GateGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of gate, up and weights
using HalvesGradients = std::tuple<at::Tensor, at::Tensor>;            // of the joint rows and weights

std::string gate_text(const at::Tensor& tensor) {
  return fmt::format("{} of {}", fmt::join(tensor.sizes(), " x "), c10::toString(tensor.scalar_type()));
}

void check_gate(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                const at::Tensor& order) {
  if (gate.dim() != 2 || !gate.is_floating_point() || gate.sizes() != up.sizes() ||
      gate.scalar_type() != up.scalar_type() || gate.size(0) != order.numel())
    throw ValueError(describe(
        "weighted_silu_product: gate and up", fmt::format("{} and {}", gate_text(gate), gate_text(up)),
        fmt::format("two floating matrices of {} rows, one for each choice, of the same "
                    "width and dtype",
                    order.numel())));
  const at::ScalarType wanted = gate.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (weights.dim() != 2 || weights.numel() != order.numel() || weights.scalar_type() != wanted)
    throw ValueError(
        describe("weighted_silu_product: weights", gate_text(weights),
                 fmt::format("[tokens, choices] of {}, {} in all", c10::toString(wanted), order.numel())));
}

at::Tensor half_of(const at::Tensor& joint, int which) {
  if (joint.dim() != 2 || joint.size(1) % 2 != 0)
    throw ValueError(describe("weighted_silu_halves: rows", gate_text(joint), "a matrix of even width"));
  const std::int64_t width = joint.size(1) / 2;
  return joint.narrow(1, which * width, width);
}

// ---- forward ----

at::Tensor weighted_gate_meta(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                              const at::Tensor& order) {
  check_gate(gate, up, weights, order);
  return at::empty(gate.sizes(), gate.options());
}

at::Tensor weighted_gate_cpu(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& given_weights,
                             const at::Tensor& order) {
  at::Tensor inner = weighted_gate_meta(gate, up, given_weights, order);
  if (inner.numel() == 0) return inner;
  const at::Tensor weights = given_weights.contiguous();
  const std::int64_t width = gate.size(1), gate_stride = gate.stride(0), up_stride = up.stride(0);
  const std::int32_t* choice_in = order.data_ptr<std::int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, gate.scalar_type(), "penstock::weighted_silu_product", [&] {
        using Sum = detail::RowSum<scalar_t>;
        const scalar_t *gates = gate.data_ptr<scalar_t>(), *ups = up.data_ptr<scalar_t>();
        const Sum* factors = weights.data_ptr<Sum>();
        scalar_t* out = inner.data_ptr<scalar_t>();
        detail::for_each_gate_tile<scalar_t>(
            gate, [&](std::int64_t first, std::int64_t count, const Sum* shares) {
              for (std::int64_t slot = first; slot < first + count; ++slot, shares += width) {
                scalar_t* row = out + slot * width;
                if (choice_in[slot] < 0)
                  std::fill_n(row, width, scalar_t(0));
                else
                  detail::gate_row(gates + slot * gate_stride, ups + slot * up_stride, shares,
                                   factors[choice_in[slot]], width, row);
              }
            });
      });
  return inner;
}

at::Tensor weighted_gate_cuda(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                              const at::Tensor& order) {
  at::Tensor inner = weighted_gate_meta(gate, up, weights, order);
  if (inner.numel() > 0) detail::launch_weighted_gate(gate, up, weights.contiguous(), order, inner);
  return inner;
}

// ---- backward: writes the gradients of gate and up into the given rows ----

// Views of joint rows, or tensors of their own.
struct GateRows {
  at::Tensor gate, up;
};

void gate_gradients_cpu(const GateRows& in, const at::Tensor& weights, const at::Tensor& order,
                        const at::Tensor& slot, const at::Tensor& gradient, const GateRows& out,
                        const at::Tensor& by_weight) {
  const std::int64_t width = in.gate.size(1);
  const std::int32_t *choice_in = order.data_ptr<std::int32_t>(), *slots = slot.data_ptr<std::int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, in.gate.scalar_type(), "penstock::weighted_silu_product_backward", [&] {
        using Sum = detail::RowSum<scalar_t>;
        const auto row = [](const at::Tensor& rows, std::int64_t at) {
          return rows.data_ptr<scalar_t>() + at * rows.stride(0);
        };
        const Sum* factors = weights.data_ptr<Sum>();
        Sum* to_weights = by_weight.data_ptr<Sum>();
        for (std::int64_t choice = 0; choice < slot.numel(); ++choice)
          if (slots[choice] < 0) to_weights[choice] = Sum(0);
        detail::for_each_gate_tile<scalar_t>(
            in.gate, [&](std::int64_t first, std::int64_t count, const Sum* shares) {
              for (std::int64_t at = first; at < first + count; ++at, shares += width) {
                const std::int32_t choice = choice_in[at];
                scalar_t *to_gate = row(out.gate, at), *to_up = row(out.up, at);
                if (choice < 0) {
                  std::fill_n(to_gate, width, scalar_t(0));
                  std::fill_n(to_up, width, scalar_t(0));
                } else {
                  to_weights[choice] =
                      detail::gate_row_backward(row(in.gate, at), row(in.up, at), shares, row(gradient, at),
                                                factors[choice], width, to_gate, to_up);
                }
              }
            });
      });
}

void gate_gradients(const GateRows& in, const at::Tensor& given_weights, const at::Tensor& order,
                    const at::Tensor& slot, const at::Tensor& given, const GateRows& out,
                    const at::Tensor& by_weight) {
  const at::Tensor weights = given_weights.contiguous(), gradient = given.contiguous(),
                   slots = slot.contiguous();
  check_gate(in.gate, in.up, weights, order);
  if (in.gate.is_meta()) return;
  if (in.gate.numel() == 0)
    by_weight.zero_();
  else if (in.gate.is_cuda())
    detail::launch_weighted_gate_backward(in.gate, in.up, weights, order, slots, gradient, out.gate, out.up,
                                          by_weight);
  else
    gate_gradients_cpu(in, weights, order, slots, gradient, out, by_weight);
}

at::Tensor like(const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }

GateGradients weighted_gate_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                                     const at::Tensor& order, const at::Tensor& slot,
                                     const at::Tensor& gradient) {
  GateGradients result{like(gate), like(up), like(weights)};
  gate_gradients({gate, up}, weights, order, slot, gradient, {std::get<0>(result), std::get<1>(result)},
                 std::get<2>(result));
  return result;
}

at::Tensor weighted_halves_meta(const at::Tensor& joint, const at::Tensor& weights, const at::Tensor& order) {
  return weighted_gate_meta(half_of(joint, 0), half_of(joint, 1), weights, order);
}
at::Tensor weighted_halves_cpu(const at::Tensor& joint, const at::Tensor& weights, const at::Tensor& order) {
  return weighted_gate_cpu(half_of(joint, 0), half_of(joint, 1), weights, order);
}
at::Tensor weighted_halves_cuda(const at::Tensor& joint, const at::Tensor& weights, const at::Tensor& order) {
  return weighted_gate_cuda(half_of(joint, 0), half_of(joint, 1), weights, order);
}
HalvesGradients weighted_halves_backward(const at::Tensor& joint, const at::Tensor& weights,
                                         const at::Tensor& order, const at::Tensor& slot,
                                         const at::Tensor& gradient) {
  HalvesGradients result{like(joint), like(weights)};
  const at::Tensor& rows = std::get<0>(result);
  gate_gradients({half_of(joint, 0), half_of(joint, 1)}, weights, order, slot, gradient,
                 {half_of(rows, 0), half_of(rows, 1)}, std::get<1>(result));
  return result;
}

// ---- through the dispatcher, so that modes see them ----

template <class Signature>
auto gate_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct WeightedSiluProduct : torch::autograd::Function<WeightedSiluProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given_gate,
                            const at::Tensor& given_up, const at::Tensor& weights, const at::Tensor& order,
                            const at::Tensor& slot) {
    static const auto op = gate_operator<decltype(weighted_gate_cpu)>("penstock::weighted_silu_product");
    note_history(context, {given_gate, given_up, weights});
    context->set_materialize_grads(false);
    const at::Tensor gate = given_gate.contiguous(), up = given_up.contiguous();
    context->save_for_backward({gate, up, weights, order, slot});
    return op.call(gate, up, weights, order);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        gate_operator<decltype(weighted_gate_backward)>("penstock::weighted_silu_product_backward");
    if (!gradients[0].defined()) return variable_list(5);
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::weighted_silu_product", gradients, [&] {
      const auto [gate, up, weights] =
          op.call(saved[0], saved[1], saved[2], saved[3], saved[4], gradients[0]);
      return variable_list{gate, up, weights, at::Tensor(), at::Tensor()};
    });
  }
};

struct WeightedSiluHalves : torch::autograd::Function<WeightedSiluHalves> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given, const at::Tensor& weights,
                            const at::Tensor& order, const at::Tensor& slot) {
    static const auto op = gate_operator<decltype(weighted_halves_cpu)>("penstock::weighted_silu_halves");
    note_history(context, {given, weights});
    context->set_materialize_grads(false);
    const at::Tensor joint = given.contiguous();
    context->save_for_backward({joint, weights, order, slot});
    return op.call(joint, weights, order);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        gate_operator<decltype(weighted_halves_backward)>("penstock::weighted_silu_halves_backward");
    if (!gradients[0].defined()) return variable_list(4);
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::weighted_silu_halves", gradients, [&] {
      const auto [joint, weights] = op.call(saved[0], saved[1], saved[2], saved[3], gradients[0]);
      return variable_list{joint, weights, at::Tensor(), at::Tensor()};
    });
  }
};

}  // namespace

at::Tensor weighted_silu_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weights,
                                 const ExpertOrder& order) {
  return WeightedSiluProduct::apply(gate, up, weights, order.order, order.slot);
}

at::Tensor weighted_silu_halves(const at::Tensor& joint, const at::Tensor& weights,
                                const ExpertOrder& order) {
  return WeightedSiluHalves::apply(joint, weights, order.order, order.slot);
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("weighted_silu_product(Tensor gate, Tensor up, Tensor weights, Tensor order) -> Tensor");
  library.def(
      "weighted_silu_product_backward(Tensor gate, Tensor up, Tensor weights, Tensor order, Tensor slot, "
      "Tensor gradient) -> (Tensor, Tensor, Tensor)");
  library.def("weighted_silu_halves(Tensor joint, Tensor weights, Tensor order) -> Tensor");
  library.def(
      "weighted_silu_halves_backward(Tensor joint, Tensor weights, Tensor order, Tensor slot, Tensor "
      "gradient) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) {
  library.impl("weighted_silu_product", &weighted_gate_cpu);
  library.impl("weighted_silu_product_backward", &weighted_gate_backward);
  library.impl("weighted_silu_halves", &weighted_halves_cpu);
  library.impl("weighted_silu_halves_backward", &weighted_halves_backward);
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("weighted_silu_product", &weighted_gate_cuda);
  library.impl("weighted_silu_product_backward", &weighted_gate_backward);
  library.impl("weighted_silu_halves", &weighted_halves_cuda);
  library.impl("weighted_silu_halves_backward", &weighted_halves_backward);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("weighted_silu_product", &weighted_gate_meta);
  library.impl("weighted_silu_product_backward", &weighted_gate_backward);
  library.impl("weighted_silu_halves", &weighted_halves_meta);
  library.impl("weighted_silu_halves_backward", &weighted_halves_backward);
}

}  // namespace penstock
