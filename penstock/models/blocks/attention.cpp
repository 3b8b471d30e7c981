#include "penstock/models/blocks/attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/models/blocks/rotary.h"
#include "penstock/module_scope.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/fused_attention.h"

namespace penstock::models {

AttentionImpl::AttentionImpl(const AttentionOptions& options, std::int64_t block)
    : options_(options.resolved()),
      block_(block),
      window_(options_.window_of(block)),
      has_positions_(options_.has_positions(block)) {
  reset();
}

void AttentionImpl::reset() {
  const auto linear = [](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  query = register_module("query", linear(options_.width, options_.query_width()));
  key = register_module("key", linear(options_.width, options_.key_width()));
  value = register_module("value", linear(options_.width, options_.key_width()));
  output = register_module("output", linear(options_.query_width(), options_.width));
}

void AttentionImpl::initialize(const std::string& name, const BlockInit& init) {
  fill_normal(query->weight, name + ".query.weight", init.seed, init.deviation);
  fill_normal(key->weight, name + ".key.weight", init.seed, init.deviation);
  fill_normal(value->weight, name + ".value.weight", init.seed, init.deviation);
  fill_normal(output->weight, name + ".output.weight", init.seed, init.residual);
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const AttentionContext& context) {
  const ModuleScope running(*this);
  const LocalRegion region(x, query->weight, Rows::Batch);
  const at::Tensor in = cast_once(region.enter(x));
  const std::int64_t batch = in.size(0), length = in.size(1), head_width = options_.head_width;
  const auto heads = [&](const torch::nn::Linear& part) {
    const at::Tensor all = at::linear(in, region.weight(part->weight));
    if (all.size(2) % head_width != 0)
      throw ValueError(describe(fmt::format("blocks.{}.attention", block_),
                                fmt::format("{} columns on this rank", all.size(2)),
                                fmt::format("whole heads of {}", head_width),
                                "use a tensor parallel size that divides heads and key_value_heads"));
    return all.view({batch, length, all.size(2) / head_width, head_width});
  };
  const auto placed = [&](const at::Tensor& x) { return has_positions_ ? rotate(x, context.turns) : x; };
  const at::Tensor q = placed(heads(query)).transpose(1, 2);
  at::Tensor k = placed(heads(key)).transpose(1, 2), v = heads(value).transpose(1, 2);
  if (context.cache != nullptr) std::tie(k, v) = context.cache->put(block_, k, v, window_);
  const at::Tensor mixed =
      attend(q, k, v, context.mask, window_).transpose(1, 2).reshape({batch, length, q.size(1) * head_width});
  return region.leave_sum(at::linear(mixed, region.weight(output->weight)));
}

}  // namespace penstock::models
