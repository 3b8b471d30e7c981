#include "penstock/models/blocks/dynamic_tanh.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"
#include "penstock/models/blocks/local_region.h"
#include "penstock/module_scope.h"

namespace penstock::models {

DynamicTanhImpl::DynamicTanhImpl(std::int64_t width) : width_(width) { reset(); }

void DynamicTanhImpl::reset() {
  weight = register_parameter("weight", at::ones({width_}));
  bias = register_parameter("bias", at::zeros({width_}));
  alpha = register_parameter("alpha", at::full({1}, kInitialAlpha));
}

void DynamicTanhImpl::initialize(const std::string&, const BlockInit&) {
  const c10::AutoGradMode no_grad(false);
  weight.fill_(1);
  bias.fill_(0);
  alpha.fill_(kInitialAlpha);
}

at::Tensor DynamicTanhImpl::forward(const at::Tensor& x) {
  const ModuleScope running(*this);
  if (!x.defined() || x.dim() < 1 || x.size(-1) != width_ || !x.is_floating_point())
    throw ValueError(describe("DynamicTanh: input", shown(x), fmt::format("[..., {}]", width_)));
  const LocalRegion region(x, weight, Rows::BatchAndLength);
  const at::Tensor own = region.enter(x);
  const at::ScalarType wide = wide_dtype(own.scalar_type());
  const auto factor = [&](const at::Tensor& parameter) { return region.weight(parameter).to(wide); };
  const at::Tensor bounded = at::tanh(own.to(wide).mul(factor(alpha)));
  return region.leave_sum(at::addcmul(factor(bias), bounded, factor(weight)).to(own.scalar_type()));
}

}  // namespace penstock::models
