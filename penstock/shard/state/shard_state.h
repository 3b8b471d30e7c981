// What Penstock itself needs of a ShardState (fully_shard.h): its groups of parameters, and how it is made
// and found.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "penstock/fully_shard.h"
#include "penstock/shard/state/shard_group.h"

namespace penstock {

// The first of the module's groups; null if other sharded modules inside hold all parameters.
ShardGroup* first_group(const ShardState& state);
// The module's own groups: one, or one for each mesh that ShardOptions::shard_placement chose.
std::vector<ShardGroup*> own_groups(const ShardState& state);
// Those of the module and of all sharded modules inside it.
std::vector<ShardGroup*> all_groups(const ShardState& state);

std::shared_ptr<ShardState> make_shard_state(torch::nn::Module& module, const ShardMesh& mesh,
                                             const ShardOptions& options);
std::shared_ptr<ShardState> find_shard_state(const torch::nn::Module& module);
// The same, but also finds the state if every parameter of the module was replaced by another object of its
// name and shape.
std::shared_ptr<ShardState> find_replaced_shard_state(const torch::nn::Module& module);

}  // namespace penstock
