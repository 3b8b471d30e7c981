#include "penstock/torch/experts/expert_rows.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/experts/expert_kernels.h"
#include "penstock/torch/experts/expert_rows_cpu.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = c10::optional<at::Tensor>;

constexpr std::int64_t kTokensPerTask = 16;  // of a thread at a time

at::ScalarType weight_dtype(const at::Tensor& rows) {
  return rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::string rows_text(const at::Tensor& tensor) {
  return fmt::format("{}", fmt::join(tensor.sizes(), " x "));
}

void check_matrix(const at::Tensor& tensor, const char* operation, const char* what) {
  if (tensor.dim() != 2 || !tensor.is_floating_point())
    throw ValueError(describe(fmt::format("{}: {}", operation, what),
                              fmt::format("{} of {}", rows_text(tensor), c10::toString(tensor.scalar_type())),
                              "a floating matrix"));
}

// ---- gather: tokens [T, D], order [T * k] -> [T * k, D] ----

at::Tensor gathered_like(const at::Tensor& tokens, const at::Tensor& order) {
  check_matrix(tokens, "gather_rows", "tokens");
  if (tokens.size(0) == 0 ? order.numel() != 0 : order.numel() % tokens.size(0) != 0)
    throw ValueError(describe("gather_rows: tokens", fmt::format("{} rows", tokens.size(0)),
                              fmt::format("a divisor of the {} choices", order.numel()),
                              "use the order of this batch's choices"));
  return at::empty({order.numel(), tokens.size(1)}, tokens.options());
}

at::Tensor gather_rows_meta(const at::Tensor& tokens, const at::Tensor& order) {
  return gathered_like(tokens, order);
}

at::Tensor gather_rows_cpu(const at::Tensor& given, const at::Tensor& order) {
  const at::Tensor tokens = given.contiguous();
  at::Tensor rows = gathered_like(tokens, order);
  if (rows.numel() == 0) return rows;
  const std::int64_t choices = order.numel() / tokens.size(0);
  const std::size_t bytes = static_cast<std::size_t>(tokens.size(1)) * tokens.element_size();
  const char* from = static_cast<const char*>(tokens.data_ptr());
  char* to = static_cast<char*>(rows.data_ptr());
  const std::int32_t* choice_in = order.data_ptr<std::int32_t>();
  at::parallel_for(0, order.numel(), kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin; slot < end; ++slot) {
      char* row = to + static_cast<std::size_t>(slot) * bytes;
      if (choice_in[slot] < 0)
        std::memset(row, 0, bytes);
      else
        std::memcpy(row, from + static_cast<std::size_t>(choice_in[slot] / choices) * bytes, bytes);
    }
  });
  return rows;
}

at::Tensor gather_rows_cuda(const at::Tensor& given, const at::Tensor& order) {
  const at::Tensor tokens = given.contiguous();
  at::Tensor rows = gathered_like(tokens, order);
  if (rows.numel() > 0) detail::launch_gather_rows(tokens, order, rows);
  return rows;
}

// ---- combine: rows [T * k, D], slot [T, k], weights [T, k] or none -> [T, D] ----

at::Tensor combined_like(const at::Tensor& rows, const at::Tensor& slot, const MaybeTensor& weights) {
  check_matrix(rows, "combine_rows", "rows");
  if (slot.dim() != 2 || slot.numel() != rows.size(0))
    throw ValueError(describe("combine_rows: rows", rows_text(rows),
                              fmt::format("one for each of the {} choices", slot.numel())));
  if (weights && (weights->sizes() != slot.sizes() || weights->scalar_type() != weight_dtype(rows)))
    throw ValueError(
        describe("combine_rows: weights",
                 fmt::format("{} of {}", rows_text(*weights), c10::toString(weights->scalar_type())),
                 fmt::format("{} of {}", rows_text(slot), c10::toString(weight_dtype(rows)))));
  return at::empty({slot.size(0), rows.size(1)}, rows.options());
}

at::Tensor combine_rows_meta(const at::Tensor& rows, const at::Tensor& slot, const MaybeTensor& weights) {
  return combined_like(rows, slot, weights);
}

at::Tensor combine_rows_cpu(const at::Tensor& given, const at::Tensor& slot,
                            const MaybeTensor& given_weights) {
  const at::Tensor rows = given.contiguous(), slots = slot.contiguous();
  const at::Tensor weights = given_weights ? given_weights->contiguous() : at::Tensor();
  at::Tensor sums = combined_like(rows, slots, given_weights);
  const std::int64_t choices = slots.size(1), width = rows.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, rows.scalar_type(), "penstock::combine_rows", [&] {
        using Sum = detail::RowSum<scalar_t>;
        const scalar_t* values = rows.data_ptr<scalar_t>();
        const Sum* factors = weights.defined() ? weights.data_ptr<Sum>() : nullptr;
        scalar_t* out = sums.data_ptr<scalar_t>();
        at::parallel_for(0, slots.size(0), kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t token = begin; token < end; ++token)
            detail::combine_row(values, slots.data_ptr<std::int32_t>() + token * choices,
                                factors == nullptr ? nullptr : factors + token * choices, choices, width,
                                out + token * width);
        });
      });
  return sums;
}

at::Tensor combine_rows_cuda(const at::Tensor& given, const at::Tensor& slot,
                             const MaybeTensor& given_weights) {
  const at::Tensor rows = given.contiguous();
  at::Tensor sums = combined_like(rows, slot, given_weights);
  if (sums.numel() > 0)
    detail::launch_combine_rows(rows, slot.contiguous(),
                                given_weights ? given_weights->contiguous() : at::Tensor(), sums);
  return sums;
}

// ---- derivative of combine: gradients of the rows [T * k, D] and of the weights [T, k], in one pass ----

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

TwoTensors combine_gradients_like(const at::Tensor& rows, const at::Tensor& weights) {
  return {at::empty(rows.sizes(), rows.options()), at::empty(weights.sizes(), weights.options())};
}

TwoTensors combine_rows_backward_meta(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor&,
                                      const at::Tensor&, const at::Tensor&) {
  return combine_gradients_like(rows, weights);
}

TwoTensors combine_rows_backward_cpu(const at::Tensor& rows, const at::Tensor& weights,
                                     const at::Tensor& order, const at::Tensor& slot,
                                     const at::Tensor& given) {
  TwoTensors result = combine_gradients_like(rows, weights);
  auto& [row_gradient, weight_gradient] = result;
  const at::Tensor gradient = given.contiguous();
  const std::int64_t choices = slot.size(1), width = rows.size(1);
  const std::int32_t *slots = slot.data_ptr<std::int32_t>(), *choice_in = order.data_ptr<std::int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, rows.scalar_type(), "penstock::combine_rows_backward", [&] {
        using Sum = detail::RowSum<scalar_t>;
        const scalar_t *values = rows.data_ptr<scalar_t>(), *incoming = gradient.data_ptr<scalar_t>();
        const Sum* factors = weights.data_ptr<Sum>();
        scalar_t* to_rows = row_gradient.data_ptr<scalar_t>();
        Sum* to_weights = weight_gradient.data_ptr<Sum>();
        at::parallel_for(0, slot.numel(), kTokensPerTask, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t choice = begin; choice < end; ++choice) {
            const std::int32_t own = slots[choice];
            to_weights[choice] = own < 0 ? Sum(0)
                                         : detail::scale_and_multiply(
                                               values + own * width, incoming + choice / choices * width,
                                               factors[choice], width, to_rows + own * width);
            // There are as many slots as choices.
            if (choice_in[choice] < 0) std::fill_n(to_rows + choice * width, width, scalar_t(0));
          }
        });
      });
  return result;
}

TwoTensors combine_rows_backward_cuda(const at::Tensor& rows, const at::Tensor& weights,
                                      const at::Tensor& order, const at::Tensor& slot,
                                      const at::Tensor& gradient) {
  TwoTensors result = combine_gradients_like(rows, weights);
  if (rows.numel() > 0)
    detail::launch_combine_rows_backward(rows, weights, order, slot, gradient.contiguous(),
                                         std::get<0>(result), std::get<1>(result));
  else
    std::get<1>(result).zero_();
  return result;
}

// ---- through the dispatcher, so that modes see them ----

template <class Signature>
auto row_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
at::Tensor call_gather(const at::Tensor& tokens, const at::Tensor& order) {
  static const auto op = row_operator<decltype(gather_rows_cpu)>("penstock::gather_rows");
  return op.call(tokens, order);
}
at::Tensor call_combine(const at::Tensor& rows, const at::Tensor& slot, const MaybeTensor& weights) {
  static const auto op = row_operator<decltype(combine_rows_cpu)>("penstock::combine_rows");
  return op.call(rows, slot, weights);
}

// A gather and a sum are each other's derivative, as often as they are differentiated.
at::Tensor differentiable_sum(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& slot);

struct GatherRows : torch::autograd::Function<GatherRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tokens, const at::Tensor& order,
                            const at::Tensor& slot) {
    context->save_for_backward({order, slot});
    return call_gather(tokens, order);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return {c10::GradMode::is_enabled() ? differentiable_sum(gradients[0], saved[0], saved[1])
                                        : call_combine(gradients[0], saved[1], c10::nullopt),
            at::Tensor(), at::Tensor()};
  }
};

struct CombineRows : torch::autograd::Function<CombineRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const at::Tensor& given_weights, const at::Tensor& order,
                            const at::Tensor& slot) {
    note_history(context, {given, given_weights});
    const at::Tensor rows = given.contiguous(), weights = given_weights.contiguous();
    context->save_for_backward({rows, weights, order, slot});
    return call_combine(rows, slot, weights);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        row_operator<decltype(combine_rows_backward_cpu)>("penstock::combine_rows_backward");
    const variable_list saved = context->get_saved_variables();
    return once_differentiable(context, "penstock::combine_rows", gradients, [&] {
      const auto [rows, weights] = op.call(saved[0], saved[1], saved[2], saved[3], gradients[0]);
      return variable_list{rows, weights, at::Tensor(), at::Tensor()};
    });
  }
};

struct SumRows : torch::autograd::Function<SumRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& order,
                            const at::Tensor& slot) {
    // Not save_for_backward(): the second run of a recomputed part would compute the rows to get here.
    context->saved_data["order"] = order;
    context->saved_data["slot"] = slot;
    return call_combine(rows, slot, c10::nullopt);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor order = context->saved_data["order"].toTensor();
    return {c10::GradMode::is_enabled()
                ? GatherRows::apply(gradients[0], order, context->saved_data["slot"].toTensor())
                : call_gather(gradients[0], order),
            at::Tensor(), at::Tensor()};
  }
};

at::Tensor differentiable_sum(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& slot) {
  return SumRows::apply(rows, order, slot);
}

}  // namespace

at::Tensor gather_rows(const at::Tensor& tokens, const ExpertOrder& order) {
  return GatherRows::apply(tokens, order.order, order.slot);
}

at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const ExpertOrder& order) {
  return CombineRows::apply(rows, weights, order.order, order.slot);
}

at::Tensor sum_rows(const at::Tensor& rows, const ExpertOrder& order) {
  return SumRows::apply(rows, order.order, order.slot);
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("gather_rows(Tensor tokens, Tensor order) -> Tensor");
  library.def("combine_rows(Tensor rows, Tensor slot, Tensor? weights) -> Tensor");
  library.def(
      "combine_rows_backward(Tensor rows, Tensor weights, Tensor order, Tensor slot, Tensor gradient) -> "
      "(Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) {
  library.impl("gather_rows", &gather_rows_cpu);
  library.impl("combine_rows", &combine_rows_cpu);
  library.impl("combine_rows_backward", &combine_rows_backward_cpu);
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("gather_rows", &gather_rows_cuda);
  library.impl("combine_rows", &combine_rows_cuda);
  library.impl("combine_rows_backward", &combine_rows_backward_cuda);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("gather_rows", &gather_rows_meta);
  library.impl("combine_rows", &combine_rows_meta);
  library.impl("combine_rows_backward", &combine_rows_backward_meta);
}

}  // namespace penstock
