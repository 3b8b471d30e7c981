#include "penstock/shard/forward_scope.h"

#include <ATen/ATen.h>

#include "penstock/base/errors.h"
#include "penstock/shard/shard_context.h"

namespace penstock {
namespace {

at::Tensor cast(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype && tensor.defined() && at::isFloatingType(tensor.scalar_type()) ? tensor.to(*dtype) : tensor;
}

}  // namespace

ForwardScope::ForwardScope(const torch::nn::Module& module) : state_(find_shard_state(module)) {
  if (state_ && state_->group()) state_->group()->context().before_use(*state_->group());
}

ForwardScope::~ForwardScope() {
  if (state_ && state_->group()) state_->group()->context().after_forward(*state_->group());
}

at::Tensor ForwardScope::input(const at::Tensor& tensor) const {
  if (!state_ || !state_->group()) return tensor;
  const MixedPrecision& precision = state_->group()->options().mixed_precision;
  return precision.cast_forward_inputs ? cast(tensor, precision.param_dtype) : tensor;
}

at::Tensor ForwardScope::output(const at::Tensor& tensor) const {
  return state_ && state_->group() ? cast(tensor, state_->group()->options().mixed_precision.output_dtype) : tensor;
}

UnshardedScope::UnshardedScope(const torch::nn::Module& module) : state_(find_shard_state(module)) {
  if (!state_) throw StateError("UnshardedScope: the module was not given to fully_shard; give the one that was");
  for (ParameterGroup* group : state_->all_groups()) {
    group->context();
    group->begin_writes();
    groups_.push_back(group);
  }
}

UnshardedScope::~UnshardedScope() {
  for (ParameterGroup* group : groups_) {
    group->end_writes();
    group->reshard();
  }
}

}  // namespace penstock
