#include "penstock/models/blocks/feed_forward.h"

#include <ATen/ATen.h>

#include "penstock/models/blocks/local_region.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/kernels/fused_math.h"

namespace penstock::models {

FeedForwardImpl::FeedForwardImpl(const TransformerOptions& options) : options_(options.resolved()) {
  reset();
}

void FeedForwardImpl::reset() {
  const auto linear = [](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  gate = register_module("gate", linear(options_.width, options_.feed_width));
  up = register_module("up", linear(options_.width, options_.feed_width));
  down = register_module("down", linear(options_.feed_width, options_.width));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  const LocalRegion region(x, gate->weight, Rows::BatchAndLength);
  const at::Tensor in = cast_once(region.enter(x));
  const at::Tensor gated =
      silu_product(at::linear(in, region.weight(gate->weight)), at::linear(in, region.weight(up->weight)));
  return region.leave_sum(at::linear(gated, region.weight(down->weight)));
}

}  // namespace penstock::models
