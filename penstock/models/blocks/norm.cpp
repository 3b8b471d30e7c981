#include "penstock/models/blocks/norm.h"

#include <ATen/ATen.h>

#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"
#include "penstock/torch/kernels/rms_norm.h"

namespace penstock::models {

RmsNormImpl::RmsNormImpl(std::int64_t width, double epsilon) : width_(width), epsilon_(epsilon) { reset(); }

void RmsNormImpl::reset() { weight = register_parameter("weight", at::ones({width_})); }

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  const ModuleScope running(*this);
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  return region.leave_sum(rms_norm(region.enter(x), region.weight(weight), epsilon_));
}

}  // namespace penstock::models
