#include "penstock/fully_shard.h"

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/gradient_sink.h"

namespace penstock {
namespace {

at::Tensor cast(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) {
  return dtype && tensor.defined() && at::isFloatingType(tensor.scalar_type()) ? tensor.to(*dtype) : tensor;
}

}  // namespace

struct ForwardScope::Impl {
  std::shared_ptr<ShardState> state;
  std::vector<AccumulatorPtr> accumulators;  // until the autograd graph holds them
  bool captured = false;
};

ForwardScope::ForwardScope(const torch::nn::Module& module) {
  std::shared_ptr<ShardState> state = find_shard_state(module);
  if (!state || !first_group(*state)) return;
  impl_ = std::make_unique<Impl>(Impl{std::move(state), {}, StepContext::current()->captured});
  if (impl_->captured) return;  // whoever captures has gathered everything (whole_forward_scope.h)
  for (ShardGroup* group : own_groups(*impl_->state)) {
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
      impl_->accumulators.push_back(send_gradient_to(parameter, *group, slot));
    }
  }
}

ForwardScope::~ForwardScope() {
  if (!impl_ || impl_->captured) return;
  for (ShardGroup* group : own_groups(*impl_->state))
    if (!group->in_trial()) group->context().after_forward(*group);
}

at::Tensor ForwardScope::input(const at::Tensor& tensor) const {
  if (!impl_) return tensor;
  const MixedPrecision& precision = first_group(*impl_->state)->options().mixed_precision;
  return precision.cast_forward_inputs ? cast(tensor, precision.param_dtype) : tensor;
}

at::Tensor ForwardScope::output(const at::Tensor& tensor) const {
  return impl_ ? cast(tensor, first_group(*impl_->state)->options().mixed_precision.output_dtype) : tensor;
}

struct UnshardedScope::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  // Also if the constructor of the scope throws, for the groups that it had reached.
  ~Impl() {
    for (ShardGroup* group : groups) {
      group->end_writes();
      if (!group->writable()) group->reshard();  // otherwise a scope around this one continues
    }
  }

  std::shared_ptr<ShardState> state;
  std::vector<ShardGroup*> groups;  // whose writes this scope began
};

UnshardedScope::UnshardedScope(const torch::nn::Module& module) : impl_(std::make_unique<Impl>()) {
  impl_->state = find_shard_state(module);
  if (!impl_->state)
    throw StateError("UnshardedScope: the module was not passed to fully_shard; pass the one that was");
  const std::vector<ShardGroup*> groups = all_groups(*impl_->state);
  impl_->groups.reserve(groups.size());
  for (ShardGroup* group : groups) {
    if (group->in_trial()) continue;
    group->context();
    group->begin_writes();
    impl_->groups.push_back(group);
  }
}

UnshardedScope::~UnshardedScope() = default;

}  // namespace penstock
