#include "penstock/torch/experts/expert_feed.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/experts/expert_rows_cpu.h"
#include "penstock/torch/experts/gate_tiles.h"

namespace penstock {
namespace {

constexpr std::int64_t kRowsPerTask = 16, kColumnsPerTask = 128;  // of a thread at a time
// Sums of more terms depend on their order.
constexpr std::int64_t kMostChoices = 2;

std::string feed_text(const at::Tensor& tensor) {
  return fmt::format("{} of {}", fmt::join(tensor.sizes(), " x "), c10::toString(tensor.scalar_type()));
}

void check_weight(const char* name, const at::Tensor& weight, at::IntArrayRef sizes, at::ScalarType dtype) {
  if (weight.sizes() != sizes || weight.scalar_type() != dtype)
    throw ValueError(describe(fmt::format("expert_feed: {}", name), feed_text(weight),
                              fmt::format("{} of {}", fmt::join(sizes, " x "), c10::toString(dtype))));
}

at::Tensor expert_feed_meta(const at::Tensor& tokens, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& down, const at::Tensor& weights, const at::Tensor& order,
                            const at::Tensor& ends) {
  const at::ScalarType dtype = tokens.scalar_type();
  if (tokens.dim() != 2 || (dtype != at::kFloat && dtype != at::kDouble))
    throw ValueError(
        describe("expert_feed: tokens", feed_text(tokens), "a matrix of Float or Double",
                 "use gather_rows(), grouped_product(), weighted_silu_product() and sum_rows()"));
  if (gate.dim() != 3) throw ValueError(describe("expert_feed: gate", feed_text(gate), "[experts, in, out]"));
  check_weight("gate", gate, {gate.size(0), tokens.size(1), gate.size(2)}, dtype);
  check_weight("up", up, gate.sizes(), dtype);
  check_weight("down", down, {gate.size(0), gate.size(2), gate.size(1)}, dtype);
  if (weights.dim() != 2 || weights.size(0) != tokens.size(0) || weights.numel() != order.numel() ||
      weights.scalar_type() != dtype)
    throw ValueError(
        describe("expert_feed: weights", feed_text(weights),
                 fmt::format("[tokens, choices] of {}, {} in all", c10::toString(dtype), order.numel())));
  if (order.scalar_type() != at::kInt || ends.scalar_type() != at::kInt || ends.dim() != 1 ||
      ends.size(0) != gate.size(0))
    throw ValueError(describe("expert_feed: ends", feed_text(ends), fmt::format("{} of Int", gate.size(0)),
                              "use what expert_order() returns"));
  return at::empty(tokens.sizes(), tokens.options());
}

std::int64_t most_rows(const std::int32_t* ends, std::int64_t experts, std::int64_t slots) {
  std::int64_t most = 0;
  for (std::int64_t expert = 0, first = 0; expert < experts; first = ends[expert++]) {
    if (ends[expert] < first || ends[expert] > slots)
      throw ValueError(describe(fmt::format("expert_feed: end of expert {}", expert),
                                fmt::format("{}", ends[expert]), fmt::format("from {} to {}", first, slots)));
    most = std::max(most, ends[expert] - first);
  }
  return most;
}

// The rows of one expert, in memory that all of them use in turn.
struct ExpertRows {
  ExpertRows(std::int64_t most, std::int64_t width, std::int64_t inner_width,
             const at::TensorOptions& options)
      : rows(at::empty({most, width}, options)),
        gate(at::empty({most, inner_width}, options)),
        up(at::empty({most, inner_width}, options)),
        inner(at::empty({most, inner_width}, options)) {}

  at::Tensor rows, gate, up, inner;
};

template <class Element>
void gather(const at::Tensor& tokens, const std::int32_t* choice_in, std::int64_t choices,
            const at::Tensor& rows) {
  const std::int64_t width = tokens.size(1);
  const Element* from = tokens.data_ptr<Element>();
  Element* to = rows.data_ptr<Element>();
  at::parallel_for(0, rows.size(0), kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row)
      std::copy_n(from + choice_in[row] / choices * width, width, to + row * width);
  });
}

template <class Element>
void weigh(const ExpertRows& memory, std::int64_t count, const std::int32_t* choice_in,
           const Element* weights) {
  const std::int64_t width = memory.gate.size(1);
  const Element *gate = memory.gate.data_ptr<Element>(), *up = memory.up.data_ptr<Element>();
  Element* inner = memory.inner.data_ptr<Element>();
  detail::for_each_gate_tile<Element>(
      memory.gate.narrow(0, 0, count), [&](std::int64_t first, std::int64_t rows, const Element* shares) {
        for (std::int64_t row = first; row < first + rows; ++row, shares += width)
          detail::gate_row(gate + row * width, up + row * width, shares, weights[choice_in[row]], width,
                           inner + row * width);
      });
}

// Threads have columns of their own: a token may have chosen an expert twice.
template <class Element>
void add_to_tokens(const at::Tensor& rows, const std::int32_t* choice_in, std::int64_t choices,
                   const at::Tensor& sums) {
  const std::int64_t width = sums.size(1), count = rows.size(0);
  const Element* from = rows.data_ptr<Element>();
  Element* to = sums.data_ptr<Element>();
  at::parallel_for(0, width, kColumnsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = 0; row < count; ++row) {
      const Element* __restrict part = from + row * width;
      Element* __restrict sum = to + choice_in[row] / choices * width;
      for (std::int64_t i = begin; i < end; ++i) sum[i] += part[i];
    }
  });
}

at::Tensor expert_feed_cpu(const at::Tensor& given, const at::Tensor& gate, const at::Tensor& up,
                           const at::Tensor& down, const at::Tensor& given_weights,
                           const at::Tensor& given_order, const at::Tensor& given_ends) {
  at::Tensor sums = expert_feed_meta(given, gate, up, down, given_weights, given_order, given_ends).zero_();
  if (sums.numel() == 0 || given_weights.numel() == 0) return sums;
  const at::Tensor tokens = given.contiguous(), weights = given_weights.contiguous(),
                   order = given_order.contiguous(), ends = given_ends.contiguous();
  const std::int64_t choices = weights.size(1), experts = gate.size(0);
  const std::int32_t *choice_in = order.data_ptr<std::int32_t>(), *end = ends.data_ptr<std::int32_t>();
  const std::int64_t most = most_rows(end, experts, order.numel());
  // Autocast would change the dtype of products.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "penstock::expert_feed", [&] {
    const ExpertRows memory(most, tokens.size(1), gate.size(2), tokens.options());
    for (std::int64_t expert = 0, first = 0; expert < experts; first = end[expert++]) {
      const std::int64_t count = end[expert] - first;
      if (count == 0) continue;
      const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, 0, count); };
      at::Tensor rows = part(memory.rows), by_gate = part(memory.gate), by_up = part(memory.up);
      gather<scalar_t>(tokens, choice_in + first, choices, rows);
      at::mm_out(by_gate, rows, gate[expert]);
      at::mm_out(by_up, rows, up[expert]);
      weigh<scalar_t>(memory, count, choice_in + first, weights.data_ptr<scalar_t>());
      at::mm_out(rows, part(memory.inner), down[expert]);
      add_to_tokens<scalar_t>(rows, choice_in + first, choices, sums);
    }
  });
  return sums;
}

}  // namespace

bool can_use_expert_feed(const at::Tensor& tokens, const at::Tensor& gate, const at::Tensor& up,
                         const at::Tensor& down, const at::Tensor& weights) {
  const auto wanted = [](const at::Tensor& tensor) {
    return at::GradMode::is_enabled() && tensor.requires_grad();
  };
  const at::ScalarType dtype = tokens.scalar_type();
  return tokens.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble) && weights.scalar_type() == dtype &&
         gate.scalar_type() == dtype && up.scalar_type() == dtype && down.scalar_type() == dtype &&
         weights.size(-1) <= kMostChoices && !wanted(tokens) && !wanted(gate) && !wanted(up) &&
         !wanted(down) && !wanted(weights);
}

at::Tensor expert_feed(const at::Tensor& tokens, const at::Tensor& gate, const at::Tensor& up,
                       const at::Tensor& down, const at::Tensor& weights, const ExpertOrder& order) {
  for (const at::Tensor& tensor : {tokens, gate, up, down, weights})
    if (c10::GradMode::is_enabled() && tensor.requires_grad())
      throw StateError(describe("expert_feed: an argument", feed_text(tensor) + " that requires a gradient",
                                "arguments without one, because it has no derivative",
                                "ask can_use_expert_feed() first, or call it under NoGradGuard"));
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::expert_feed", "")
                             .typed<decltype(expert_feed_cpu)>();
  return op.call(tokens, gate, up, down, weights, order.order, order.ends);
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def(
      "expert_feed(Tensor tokens, Tensor gate, Tensor up, Tensor down, Tensor weights, Tensor order, Tensor "
      "ends) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) { library.impl("expert_feed", &expert_feed_cpu); }
TORCH_LIBRARY_IMPL(penstock, Meta, library) { library.impl("expert_feed", &expert_feed_meta); }

}  // namespace penstock
