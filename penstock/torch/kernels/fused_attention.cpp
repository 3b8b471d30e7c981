#include "penstock/torch/kernels/fused_attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/kernels/attention_scores.h"
#include "penstock/torch/kernels/block_attention.h"
#include "penstock/torch/kernels/window_attention.h"

namespace penstock {
namespace {

// Up to this many keys, one mask of all queries and keys is small beside the scores of all heads.
constexpr std::int64_t kKeysAtOnce = 1024;

std::string sizes_text(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

bool is_one_or(std::int64_t size, std::int64_t expected) { return size == 1 || size == expected; }

void check_heads(const at::Tensor& q, const at::Tensor& k) {
  if (k.size(1) == 0 || q.size(1) % k.size(1) != 0)
    throw ValueError(describe("attention: heads of queries", fmt::format("{}", q.size(1)),
                              fmt::format("a multiple of the {} heads of keys", k.size(1))));
}

void check_mask(const at::Tensor& q, const at::Tensor& k, const AttentionMask& mask, std::int64_t window) {
  if (window < 0)
    throw ValueError(describe("attention: window", fmt::format("{}", window), "at least 1, or 0 for none"));
  if (q.size(2) != mask.queries() || k.size(2) > mask.keys() || k.size(2) < mask.keys_within(window))
    throw ValueError(
        describe("attention: mask", fmt::format("{} queries and {} keys", mask.queries(), mask.keys()),
                 fmt::format("{} queries and {} keys, those of the tensors", q.size(2), k.size(2)),
                 "keys may be fewer only by those before the window of the first query"));
  for (const auto& [name, tensor] :
       {std::pair<const char*, const at::Tensor&>{"documents", mask.documents()},
        std::pair<const char*, const at::Tensor&>{"positions", mask.positions()},
        std::pair<const char*, const at::Tensor&>{"row-valid counts", mask.valid()}})
    if (tensor.defined() && !is_one_or(tensor.size(0), q.size(0)))
      throw ValueError(describe(fmt::format("attention: {}", name), fmt::format("{} rows", tensor.size(0)),
                                fmt::format("{}, one for each row of the batch", q.size(0))));
  const at::Tensor& added = mask.added();
  if (added.defined() && (!is_one_or(added.size(0), q.size(0)) || !is_one_or(added.size(1), q.size(1))))
    throw ValueError(describe("attention: additive bias", sizes_text(added),
                              fmt::format("[{} or 1, {} or 1, queries, keys]", q.size(0), q.size(1)),
                              "under tensor parallelism, pass the heads of this rank"));
}

// The part of the additive bias for the keys from `first` on, in this dtype: [batch or 1, heads or 1,
// queries, keys - first].
at::Tensor added_from(const AttentionMask& mask, std::int64_t first, at::ScalarType dtype) {
  return mask.added().narrow(3, first, mask.keys() - first).to(dtype);
}

at::Tensor zero_for_padding(const at::Tensor& result, const AttentionMask& mask) {
  return mask.valid().defined() ? result.masked_fill(mask.padding_queries(), 0) : result;
}

#if PENSTOCK_TORCH_AT_LEAST(2, 0)
// Returns [batch, heads, length, width], with every key head repeated for the query heads that use it.
at::Tensor repeated(const at::Tensor& x, std::int64_t times) {
  if (times == 1) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), times, x.size(2), x.size(3)})
      .reshape({x.size(0), x.size(1) * times, x.size(2), x.size(3)});
}
#endif

// k and v: exactly the keys within the window.
at::Tensor products_at_once(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionMask& mask, std::int64_t window) {
  const std::int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), width = q.size(3),
                     groups = k.size(1), keys = k.size(2);
  const std::int64_t repeats = heads / groups;
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  // Queries that share a key head are stacked along the rows, so that keys are not copied per query head.
  const at::Tensor rows = q.reshape({batch * groups, repeats * queries, width});
  const at::Tensor columns = k.reshape({batch * groups, keys, width}).transpose(1, 2);
  at::Tensor scores;
  if (mask.is_plain_causal() && window == 0) {
    scores = at::baddbmm(mask.bias(rows, repeats), rows, columns, 1, scale);
  } else {
    scores = at::bmm(rows, columns);
    if (mask.sees_everything()) {
      scores = scores.mul(scale);
    } else {
      // Masks differ between the rows of the batch, not between heads.
      const at::Tensor bias = mask.bias(rows, repeats, window).unsqueeze(1);
      scores = at::add(bias, scores.view({batch, groups, repeats * queries, keys}), scale);
      if (mask.added().defined())
        scores = scores.view({batch, heads, queries, keys})
                     .add(added_from(mask, mask.keys() - keys, scores.scalar_type()));
      scores = scores.view({batch * groups, repeats * queries, keys});
    }
  }
  const at::Tensor mixed = at::bmm(at::softmax(scores, -1), v.reshape({batch * groups, keys, width}));
  return mixed.view({batch, heads, queries, width});
}

// As above, by the fused kernels where there are some.
at::Tensor attend_at_once(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionMask& mask, std::int64_t window) {
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  const std::int64_t repeats = q.size(1) / k.size(1);
  const bool plain = mask.is_plain_causal() && window == 0;
  const c10::optional<at::Tensor> none;
#if PENSTOCK_TORCH_AT_LEAST(2, 5)
  // With a mask, only kernels without support for grouped queries are fast.
  if (repeats > 1 && plain) return at::scaled_dot_product_attention(q, k, v, none, 0.0, true, {}, true);
#endif
  const at::Tensor keys = repeated(k, repeats), values = repeated(v, repeats);
  if (plain) return at::scaled_dot_product_attention(q, keys, values, none, 0.0, true);
  if (mask.sees_everything()) return at::scaled_dot_product_attention(q, keys, values, none, 0.0, false);
  if (!mask.added().defined())
    return at::scaled_dot_product_attention(q, keys, values, mask.allowed(q, window), 0.0, false);
  const at::Tensor bias =
      mask.bias(q, 1, window).unsqueeze(1).add(added_from(mask, mask.first_key(window), q.scalar_type()));
  return at::scaled_dot_product_attention(q, keys, values, bias, 0.0, false);
#else
  return products_at_once(q, k, v, mask, window);
#endif
}

struct SeenKeys {
  at::Tensor k, v;
};

// Without the keys that no query sees.
SeenKeys within_window(const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask,
                       std::int64_t window) {
  const std::int64_t seen = mask.keys_within(window), unseen = k.size(2) - seen;
  if (unseen == 0) return {k, v};
  return {k.narrow(2, unseen, seen), v.narrow(2, unseen, seen)};
}

at::Tensor attend_windowed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttentionMask& mask, std::int64_t window) {
  if (mask.queries() <= BandLayout::of(mask.queries(), window).block)
    return attend_at_once(q, k, v, mask, window);
  if (mask.is_causal_only() && has_window_kernel(q, k)) return attend_in_window(q, k, v, window);
  return attend_in_band(q, k, v, mask, window);
}

// A window that reaches all keys is none, unless it counts positions, which may be further apart than keys.
std::int64_t window_that_matters(const AttentionMask& mask, std::int64_t window) {
  return window >= mask.keys() && !mask.positions().defined() ? 0 : window;
}

}  // namespace

at::Tensor attend_by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionMask& mask, std::int64_t window) {
  check_heads(q, k);
  check_mask(q, k, mask, window);
  const std::int64_t matters = window_that_matters(mask, window);
  const SeenKeys seen = within_window(k, v, mask, matters);
  return zero_for_padding(products_at_once(q, seen.k, seen.v, mask, matters), mask);
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask,
                  std::int64_t window) {
  check_heads(q, k);
  check_mask(q, k, mask, window);
  const std::int64_t matters = window_that_matters(mask, window);
  const SeenKeys seen = within_window(k, v, mask, matters);
  if (matters > 0) return zero_for_padding(attend_windowed(q, seen.k, seen.v, mask, matters), mask);
  const bool at_once = mask.is_plain_causal() || mask.keys() <= kKeysAtOnce || mask.queries() == 1;
  return zero_for_padding(
      at_once ? attend_at_once(q, seen.k, seen.v, mask, 0) : attend_in_query_blocks(q, seen.k, seen.v, mask),
      mask);
}

bool attention_materializes_scores() {
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  return false;
#else
  return true;
#endif
}

}  // namespace penstock
