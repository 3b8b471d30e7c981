#include "penstock/torch/kernels/fused_attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/kernels/attention_scores.h"

namespace penstock {
namespace {

void check_heads(const at::Tensor& q, const at::Tensor& k) {
  if (k.size(1) == 0 || q.size(1) % k.size(1) != 0)
    throw ValueError(describe("attention: heads of queries", fmt::format("{}", q.size(1)),
                              fmt::format("a multiple of the {} heads of keys", k.size(1))));
}

at::Tensor lower_triangle(std::int64_t queries, std::int64_t keys, const at::Tensor& like) {
  return at::tril(like.new_ones({queries, keys}, like.options().dtype(at::kBool)), keys - queries);
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

}  // namespace

AttentionMask AttentionMask::causal(std::int64_t queries, std::int64_t keys, const at::Tensor& like) {
  if (queries > keys)
    throw ValueError(describe("attention: queries", fmt::format("{}", queries),
                              fmt::format("at most the number of keys, {}", keys)));
  AttentionMask mask;
  mask.queries_ = queries;
  mask.keys_ = keys;
  mask.plain_causal_ = queries == keys && queries > 1;
  // A single new token sees all keys; several new tokens after known ones need the triangle.
  if (queries != keys && queries > 1)
    mask.allowed_ = lower_triangle(queries, keys, like).view({1, 1, queries, keys});
  return mask;
}

AttentionMask AttentionMask::within_documents(const at::Tensor& documents) {
  if (documents.dim() != 2)
    throw ValueError(
        describe("attention: documents", fmt::format("{} dims", documents.dim()), "2 dims: batch, length"));
  AttentionMask mask;
  mask.queries_ = mask.keys_ = documents.size(1);
  const at::Tensor same = documents.unsqueeze(2).eq(documents.unsqueeze(1));
  mask.allowed_ = same.logical_and(lower_triangle(mask.queries_, mask.keys_, documents)).unsqueeze(1);
  return mask;
}

const at::Tensor& AttentionMask::allowed(const at::Tensor& like) const {
  if (!allowed_.defined() && plain_causal_)
    allowed_ = lower_triangle(queries_, keys_, like).view({1, 1, queries_, keys_});
  return allowed_;
}

const at::Tensor& AttentionMask::bias(const at::Tensor& like, std::int64_t repeats) const {
  if (!bias_.defined() || bias_.scalar_type() != like.scalar_type() || bias_repeats_ != repeats) {
    const at::Tensor rows = allowed(like).squeeze(1);
    const at::Tensor hidden = rows.new_zeros(rows.sizes(), rows.options().dtype(like.scalar_type()))
                                  .masked_fill_(rows.logical_not(), -std::numeric_limits<double>::infinity());
    bias_ = repeats == 1 ? hidden : hidden.repeat({1, repeats, 1});
    bias_repeats_ = repeats;
  }
  return bias_;
}

at::Tensor attend_by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionMask& mask) {
  check_heads(q, k);
  const std::int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), width = q.size(3),
                     groups = k.size(1), keys = k.size(2);
  const std::int64_t repeats = heads / groups;
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  // Queries that share a key head are stacked along the rows, so that keys are not copied per query head.
  const at::Tensor rows = q.reshape({batch * groups, repeats * queries, width});
  const at::Tensor columns = k.reshape({batch * groups, keys, width}).transpose(1, 2);
  at::Tensor scores;
  if (mask.is_plain_causal()) {
    scores = at::baddbmm(mask.bias(rows, repeats), rows, columns, 1, scale);
  } else {
    scores = at::bmm(rows, columns);
    if (mask.sees_everything()) {
      scores = scores.mul(scale);
    } else {
      // Masks differ between the rows of the batch, not between heads.
      const at::Tensor bias = mask.bias(rows, repeats).unsqueeze(1);
      scores = at::add(bias, scores.view({batch, groups, repeats * queries, keys}), scale)
                   .view({batch * groups, repeats * queries, keys});
    }
  }
  const at::Tensor mixed = at::bmm(at::softmax(scores, -1), v.reshape({batch * groups, keys, width}));
  return mixed.view({batch, heads, queries, width});
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionMask& mask) {
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  check_heads(q, k);
  const std::int64_t repeats = q.size(1) / k.size(1);
  const c10::optional<at::Tensor> none;
#if PENSTOCK_TORCH_AT_LEAST(2, 5)
  // With a mask, only kernels without support for grouped queries are fast.
  if (repeats > 1 && mask.is_plain_causal())
    return at::scaled_dot_product_attention(q, k, v, none, 0.0, true, {}, true);
#endif
  const at::Tensor keys = repeated(k, repeats), values = repeated(v, repeats);
  if (mask.is_plain_causal()) return at::scaled_dot_product_attention(q, keys, values, none, 0.0, true);
  if (mask.sees_everything()) return at::scaled_dot_product_attention(q, keys, values, none, 0.0, false);
  return at::scaled_dot_product_attention(q, keys, values, mask.allowed(q), 0.0, false);
#else
  return attend_by_products(q, k, v, mask);
#endif
}

bool attention_materializes_scores() {
#if PENSTOCK_TORCH_AT_LEAST(2, 0)
  return false;
#else
  return true;
#endif
}

}  // namespace penstock
