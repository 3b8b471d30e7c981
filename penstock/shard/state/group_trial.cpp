// A group in a trial run: parameters with the gathered shape, without their values and without a gather.
#include <ATen/ATen.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/shard/state/group_internal.h"
#include "penstock/shard/state/registry.h"
#include "penstock/shard/state/shard_group.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {

using detail::NoHooksOrGradScope;

namespace {

at::Tensor tensor_for_trial(const ShardedParameter& p, at::Device device, bool fake) {
  const at::TensorOptions options = at::TensorOptions(p.compute_dtype).device(device);
  const at::Tensor whole =
      fake ? make_fake(p.layout().shape(), options) : at::zeros(p.layout().shape(), options);
  mark_for_any_hook(whole);
  if (!p.placement.original) return whole;
  const detail::DTensorPayload& like = *detail::dtensor_payload(p.unsharded);
  at::Tensor distributed = like.rebuild({whole}, geometry_of(p.unsharded));
  mark_for_any_hook(distributed);
  return distributed;
}

}  // namespace

void ShardGroup::begin_trial(bool fake) {
  check_materialized();
  // Otherwise the end of the trial would restore the old data.
  if (replaced_ && trials_.empty()) adopt_replaced();
  const NoHooksOrGradScope quiet;
  const NoModesGuard no_modes;
  std::vector<at::Tensor> made;
  for (const ShardedParameter& p : parameters_) made.push_back(tensor_for_trial(p, device_, fake));
  // Views of these are recognized by their memory, like those of gathered parameters.
  const auto know = [&](const at::Tensor& tensor) {
    const at::Tensor local = detail::local_of(tensor);
    trial_memory_.push_back(local.storage().unsafeGetStorageImpl());
    detail::register_member(trial_memory_.back(), {this, -1});
  };
  trials_.push_back(made);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    know(made[i]);
    const at::Tensor parameter = parameters_[i].parameter();
    if (!parameter.defined()) continue;
    switch_data(parameter, made[i]);
    know(parameter);
  }
}

void ShardGroup::end_trial() {
  PENSTOCK_INVARIANT(!trials_.empty(), "end_trial without begin_trial");
  const NoHooksOrGradScope quiet;
  const std::vector<at::Tensor> ended = std::move(trials_.back());
  trials_.pop_back();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& p = parameters_[i];
    const at::Tensor parameter = p.parameter();
    if (!parameter.defined()) continue;
    switch_data(parameter, !trials_.empty()                       ? trials_.back()[i]
                           : state_ == ShardGroupState::Unsharded ? p.unsharded
                                                                  : p.sharded);
  }
  if (!trials_.empty()) return;
  for (const void* memory : trial_memory_) detail::unregister_member(memory);
  trial_memory_.clear();
}

}  // namespace penstock
