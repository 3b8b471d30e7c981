#include "penstock/shard/state/whole_forward_scope.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "penstock/errors.h"
#include "penstock/shard/state/shard_context.h"

namespace penstock {

WholeForwardScope::WholeForwardScope(const std::vector<ShardState*>& states) {
  for (ShardState* state : states)
    for (ShardGroup* group : all_groups(*state)) {
      const MixedPrecision& precision = group->options().mixed_precision;
      if (precision.param_dtype && precision.cast_forward_inputs)
        throw NotImplemented(fmt::format(
            "fully_shard: '{}' has MixedPrecision::param_dtype with cast_forward_inputs, which a captured "
            "forward does not support; set cast_forward_inputs to false and cast inputs in forward, or use "
            "autocast",
            group->name()));
    }
  try {
    for (ShardState* state : states)
      for (ShardGroup* group : all_groups(*state)) {
        if (group->in_trial()) continue;
        gathered_.push_back({group, group->held()});
        group->set_held(true);  // using the next group must not free this one
      }
    for (const Gathered& each : gathered_) {
      ShardGroup& group = *each.group;
      group.context().before_use(group);
      if (!at::GradMode::is_enabled()) continue;
      for (std::size_t slot = 0; slot < group.parameters().size(); ++slot) {
        const at::Tensor parameter = group.parameters()[slot].parameter();
        if (!parameter.defined() || !parameter.requires_grad()) continue;
        group.note_use();
        accumulators_.push_back(send_gradient_to(parameter, group, slot));
      }
    }
  } catch (...) {
    end();
    throw;
  }
}

WholeForwardScope::~WholeForwardScope() { end(); }

void WholeForwardScope::end() {
  for (const Gathered& each : gathered_) each.group->set_held(each.was_held);
  for (const Gathered& each : gathered_)
    if (each.group->state() == ShardGroupState::Unsharded) each.group->context().after_forward(*each.group);
  gathered_.clear();
}

}  // namespace penstock
