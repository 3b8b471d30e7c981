#include "penstock/pipeline/stage/sharded_modules.h"

#include <algorithm>

#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_state.h"

namespace penstock {

namespace {

// Returns the sharded modules that are not inside another sharded module of the stage.
std::vector<ShardState*> outermost_states(const StageModule& module) {
  std::vector<ShardState*> found;
  for (const auto& outer : module.modules())
    for (const auto& each : outer->modules(/*include_self=*/true))
      if (ShardState* state = shard_state_of(*each);
          state != nullptr && std::find(found.begin(), found.end(), state) == found.end())
        found.push_back(state);
  std::vector<ShardState*> roots;
  for (ShardState* state : found)
    if (std::none_of(found.begin(), found.end(),
                     [&](const ShardState* other) { return other != state && other->contains(*state); }))
      roots.push_back(state);
  return roots;
}

}  // namespace

ShardedModules::ShardedModules(const StageModule& module) : roots_(outermost_states(module)) {}

void ShardedModules::set_driven(bool driven) {
  for (ShardState* root : roots_) {
    root->set_is_last_backward(!driven);
    root->set_reshard_after_backward(!driven);
    root->set_requires_gradient_sync(!driven);
    for (ShardGroup* group : all_groups(*root)) group->set_held(driven);
  }
}

void ShardedModules::begin_step() { set_driven(true); }

void ShardedModules::unshard() {
  for (ShardState* root : roots_)
    for (ShardGroup* group : all_groups(*root)) {
      group->context();  // ranks agree on the parameters before the first gather
      group->unshard();
    }
}

void ShardedModules::reshard() {
  for (ShardState* root : roots_)
    for (ShardGroup* group : all_groups(*root)) group->reshard();
}

void ShardedModules::reduce() {
  set_driven(false);
  for (ShardState* root : roots_) {
    root->post_backward();
    root->final_callback();
  }
}

void ShardedModules::end_step() {
  set_driven(false);
  reshard();
}

ShardedTrial::ShardedTrial(const StageModule& module, bool fake) {
  try {
    for (ShardState* root : outermost_states(module))
      for (ShardGroup* group : all_groups(*root)) {
        group->begin_trial(fake);
        groups_.push_back(group);
      }
  } catch (...) {
    end();
    throw;
  }
}

ShardedTrial::~ShardedTrial() { end(); }

void ShardedTrial::end() {
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) (*group)->end_trial();
  groups_.clear();
}

}  // namespace penstock
