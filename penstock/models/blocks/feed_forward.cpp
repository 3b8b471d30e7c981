#include "penstock/models/blocks/feed_forward.h"

#include <ATen/ATen.h>

#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {

FeedForwardImpl::FeedForwardImpl(const TransformerOptions& options)
    : FeedForwardImpl(options.width, options.resolved().feed_width) {}

FeedForwardImpl::FeedForwardImpl(std::int64_t width, std::int64_t feed_width)
    : width_(width), feed_width_(feed_width) {
  reset();
}

void FeedForwardImpl::reset() {
  const auto linear = [](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  gate = register_module("gate", linear(width_, feed_width_));
  up = register_module("up", linear(width_, feed_width_));
  down = register_module("down", linear(feed_width_, width_));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  const ModuleScope running(*this);
  const LocalRegion region(x, gate->weight, Rows::BatchAndLength);
  return region.leave_sum(terms(region, cast_once(region.enter(x))));
}

at::Tensor FeedForwardImpl::terms(const LocalRegion& region, const at::Tensor& in) const {
  const at::Tensor gated =
      silu_product(at::linear(in, region.weight(gate->weight)), at::linear(in, region.weight(up->weight)));
  return at::linear(gated, region.weight(down->weight));
}

}  // namespace penstock::models
