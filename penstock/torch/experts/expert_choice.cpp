#include "penstock/torch/experts/expert_choice.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock {
namespace {

using OrderTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_scores(const at::Tensor& scores, std::int64_t count) {
  if (scores.dim() != 2 || !scores.is_floating_point())
    throw ValueError(describe("top_choices: scores",
                              fmt::format("{} dims of {}", scores.dim(), c10::toString(scores.scalar_type())),
                              "a floating tensor [tokens, experts]"));
  if (count < 1 || count > scores.size(1))
    throw ValueError(describe("top_choices: count", fmt::format("{}", count),
                              fmt::format("from 1 to the number of experts, {}", scores.size(1))));
}

at::Tensor no_choices(const at::Tensor& scores, std::int64_t count) {
  return at::empty({scores.size(0), count}, scores.options().dtype(at::kLong));
}

at::Tensor top_choices_meta(const at::Tensor& scores, std::int64_t count, std::string) {
  check_scores(scores, count);
  return no_choices(scores, count);
}

// Selects by insertion into a list of the best so far: few choices, and most experts fail the first
// comparison. `>` keeps the lower index in front among equals.
template <class Number>
void choose(const Number* scores, std::int64_t experts, std::int64_t count, std::int64_t* chosen,
            std::vector<Number>& best) {
  best.assign(static_cast<std::size_t>(count), -std::numeric_limits<Number>::infinity());
  std::int64_t found = 0;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const Number score =
        std::isnan(scores[expert]) ? -std::numeric_limits<Number>::infinity() : scores[expert];
    if (found == count && !(score > best[static_cast<std::size_t>(count - 1)])) continue;
    std::int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && score > best[static_cast<std::size_t>(at - 1)]; --at) {
      best[static_cast<std::size_t>(at)] = best[static_cast<std::size_t>(at - 1)];
      chosen[at] = chosen[at - 1];
    }
    best[static_cast<std::size_t>(at)] = score;
    chosen[at] = expert;
  }
}

template <class Number>
bool all_nan(const Number* scores, std::int64_t experts) {
  for (std::int64_t expert = 0; expert < experts; ++expert)
    if (!std::isnan(scores[expert])) return false;
  return true;
}

at::Tensor top_choices_cpu(const at::Tensor& scores, std::int64_t count, std::string layer) {
  check_scores(scores, count);
  const at::Tensor values =
      (scores.scalar_type() == at::kDouble ? scores : scores.to(at::kFloat)).contiguous();
  at::Tensor choices = no_choices(scores, count);
  const std::int64_t tokens = values.size(0), experts = values.size(1);
  const auto choose_all = [&]<class Number>(const Number* numbers) {
    std::vector<Number> best;
    for (std::int64_t token = 0; token < tokens; ++token) {
      const Number* row = numbers + token * experts;
      // A row with a NaN almost always consists of NaN: look at the others only then.
      if (std::isnan(row[0]) && all_nan(row, experts))
        throw ValueError(describe(
            fmt::format("{}: router scores of token {}", layer, token), "NaN for every expert", "numbers",
            "look for values that are not finite in the hidden states before this layer and in its router"));
      choose(row, experts, count, choices.data_ptr<std::int64_t>() + token * count, best);
    }
  };
  if (values.scalar_type() == at::kDouble)
    choose_all(values.data_ptr<double>());
  else
    choose_all(values.data_ptr<float>());
  return choices;
}

at::Tensor top_choices_cuda(const at::Tensor& scores, std::int64_t count, std::string) {
  check_scores(scores, count);
  const at::Tensor values =
      (scores.scalar_type() == at::kDouble ? scores : scores.to(at::kFloat)).contiguous();
  at::Tensor choices = no_choices(scores, count);
  detail::launch_top_choices(values, choices);
  return choices;
}

void check_choices(const at::Tensor& choices, std::int64_t experts) {
  if (choices.dim() != 2 || choices.scalar_type() != at::kLong)
    throw ValueError(
        describe("expert_order: choices",
                 fmt::format("{} dims of {}", choices.dim(), c10::toString(choices.scalar_type())),
                 "an int64 tensor [tokens, choices per token]"));
  if (choices.numel() >= std::numeric_limits<std::int32_t>::max())
    throw ValueError(describe("expert_order: choices", fmt::format("{}", choices.numel()), "fewer than 2^31",
                              "use smaller batches"));
  if (experts < 1)
    throw ValueError(describe("expert_order: experts", fmt::format("{}", experts), "at least 1"));
}

OrderTensors order_tensors(const at::Tensor& choices, std::int64_t experts) {
  const auto options = choices.options().dtype(at::kInt);
  return {at::empty({choices.numel()}, options), at::empty(choices.sizes(), options),
          at::empty({experts}, options), at::empty({experts}, options)};
}

OrderTensors expert_order_meta(const at::Tensor& choices, std::int64_t experts, std::int64_t) {
  check_choices(choices, experts);
  return order_tensors(choices, experts);
}

// Counting sort: one pass counts, one places.
OrderTensors expert_order_cpu(const at::Tensor& given, std::int64_t experts, std::int64_t capacity) {
  check_choices(given, experts);
  const at::Tensor choices = given.contiguous();
  OrderTensors result = order_tensors(choices, experts);
  auto& [order, slot, ends, counts] = result;
  const std::int64_t* chosen = choices.data_ptr<std::int64_t>();
  const std::int64_t total = choices.numel();
  std::vector<std::int32_t> count(static_cast<std::size_t>(experts));
  for (std::int64_t i = 0; i < total; ++i) {
    if (chosen[i] < 0 || chosen[i] >= experts)
      throw ValueError(describe("expert_order: a choice", fmt::format("{}", chosen[i]),
                                fmt::format("from 0 to {}", experts - 1)));
    ++count[static_cast<std::size_t>(chosen[i])];
  }
  std::vector<std::int32_t> next(static_cast<std::size_t>(experts));
  std::int32_t *choice_in = order.data_ptr<std::int32_t>(), *slot_of = slot.data_ptr<std::int32_t>(),
               *end_of = ends.data_ptr<std::int32_t>();
  std::int32_t end = 0;
  for (std::size_t expert = 0; expert < count.size(); ++expert) {
    next[expert] = end;
    end += capacity > 0 && count[expert] > capacity ? static_cast<std::int32_t>(capacity) : count[expert];
    end_of[expert] = end;
  }
  std::copy(count.begin(), count.end(), counts.data_ptr<std::int32_t>());
  for (std::int64_t i = 0; i < total; ++i) {
    const auto expert = static_cast<std::size_t>(chosen[i]);
    const bool fits = next[expert] < end_of[expert];
    slot_of[i] = fits ? next[expert] : -1;
    if (fits) choice_in[next[expert]++] = static_cast<std::int32_t>(i);
  }
  for (std::int64_t i = end; i < total; ++i) choice_in[i] = -1;
  return result;
}

OrderTensors expert_order_cuda(const at::Tensor& given, std::int64_t experts, std::int64_t capacity) {
  check_choices(given, experts);
  const at::Tensor choices = given.contiguous();
  OrderTensors result = order_tensors(choices, experts);
  auto& [order, slot, ends, counts] = result;
  detail::launch_expert_order(choices, capacity, order, slot, ends, counts);
  return result;
}

}  // namespace

at::Tensor top_choices(const at::Tensor& scores, std::int64_t count, const std::string& layer) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::top_choices", "")
                             .typed<decltype(top_choices_cpu)>();
  return op.call(scores.detach(), count, layer);
}

ExpertOrder expert_order(const at::Tensor& choices, std::int64_t experts, std::int64_t capacity) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::expert_order", "")
                             .typed<decltype(expert_order_cpu)>();
  auto [order, slot, ends, counts] = op.call(choices, experts, capacity);
  return {.order = order, .slot = slot, .ends = ends, .counts = counts};
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("top_choices(Tensor scores, int count, str layer) -> Tensor");
  library.def(
      "expert_order(Tensor choices, int experts, int capacity) -> (Tensor order, Tensor slot, Tensor ends, "
      "Tensor counts)");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) {
  library.impl("top_choices", &top_choices_cpu);
  library.impl("expert_order", &expert_order_cpu);
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("top_choices", &top_choices_cuda);
  library.impl("expert_order", &expert_order_cuda);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("top_choices", &top_choices_meta);
  library.impl("expert_order", &expert_order_meta);
}

}  // namespace penstock
