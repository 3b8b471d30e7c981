#include "penstock/models/blocks/attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::models {

AttentionImpl::AttentionImpl(const TransformerOptions& options, std::int64_t block)
    : options_(options.resolved()), block_(block) {
  reset();
}

void AttentionImpl::reset() {
  const std::int64_t width = options_.width, keys = options_.key_value_heads * options_.head_width();
  const auto linear = [](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  query = register_module("query", linear(width, width));
  key = register_module("key", linear(width, keys));
  value = register_module("value", linear(width, keys));
  output = register_module("output", linear(width, width));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const AttentionContext& context) {
  const LocalRegion region(x, query->weight, Rows::Batch);
  const at::Tensor in = cast_once(region.enter(x));
  const std::int64_t batch = in.size(0), length = in.size(1), head_width = options_.head_width();
  const auto heads = [&](const torch::nn::Linear& part) {
    const at::Tensor all = at::linear(in, region.weight(part->weight));
    if (all.size(2) % head_width != 0)
      throw ValueError(describe(fmt::format("blocks.{}.attention", block_),
                                fmt::format("{} columns on this rank", all.size(2)),
                                fmt::format("whole heads of {}", head_width),
                                "use a tensor parallel size that divides heads and key_value_heads"));
    return all.view({batch, length, all.size(2) / head_width, head_width});
  };
  const at::Tensor q = rotate(heads(query), context.turns).transpose(1, 2);
  at::Tensor k = rotate(heads(key), context.turns).transpose(1, 2), v = heads(value).transpose(1, 2);
  if (context.cache != nullptr) std::tie(k, v) = context.cache->put(block_, k, v);
  const at::Tensor mixed =
      attend(q, k, v, context.mask).transpose(1, 2).reshape({batch, length, q.size(1) * head_width});
  return region.leave_sum(at::linear(mixed, region.weight(output->weight)));
}

}  // namespace penstock::models
