#include "penstock/shard/state/forward_scope.h"

#include <ATen/ATen.h>

#include "penstock/errors.h"
#include "penstock/dtensor.h"
#include "penstock/shard/state/shard_context.h"

namespace penstock {
namespace {

at::Tensor cast(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype && tensor.defined() && at::isFloatingType(tensor.scalar_type()) ? tensor.to(*dtype) : tensor;
}

}  // namespace

ForwardScope::ForwardScope(const torch::nn::Module& module) : state_(find_shard_state(module)) {
  if (!state_ || !state_->group()) return;
  for (ShardGroup* group : state_->groups()) {
    if (group->in_trial()) continue;
    group->context().before_use(*group);
    // Inside a backward it is enabled where a forward is recomputed.
    if (!at::GradMode::is_enabled()) continue;
    // Distributed parameters may be used by something that is not an operator (to_local): their gradients
    // must arrive here as well.
    for (std::size_t slot = 0; slot < group->parameters().size(); ++slot) {
      const at::Tensor parameter = group->parameters()[slot].parameter();
      if (!parameter.defined() || !parameter.requires_grad() || !is_dtensor(parameter)) continue;
      group->note_use();
      accumulators_.push_back(send_gradient_to(parameter, *group, slot));
    }
  }
}

ForwardScope::~ForwardScope() {
  if (!state_) return;
  for (ShardGroup* group : state_->groups())
    if (!group->in_trial()) group->context().after_forward(*group);
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
  if (!state_) throw StateError("UnshardedScope: the module was not passed to fully_shard; pass the one that was");
  for (ShardGroup* group : state_->all_groups()) {
    if (group->in_trial()) continue;
    group->context();
    group->begin_writes();
    groups_.push_back(group);
  }
}

UnshardedScope::~UnshardedScope() {
  for (ShardGroup* group : groups_) {
    group->end_writes();
    group->reshard();
  }
}

}  // namespace penstock
