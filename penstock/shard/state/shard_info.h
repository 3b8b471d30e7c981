// Finds the group that a sharded parameter belongs to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

#include "penstock/shard/state/shard_group.h"

namespace penstock {

// Describes a sharded parameter: its group, its specs and sizes.
struct ShardInfo {
  ShardGroup* group = nullptr;
  std::size_t index = 0;  // in the group

  const ShardedParameter& parameter() const { return group->parameters()[index]; }
  ShardGroupState state() const { return group->state(); }
};

// Returns std::nullopt for a tensor that is not a sharded parameter.
std::optional<ShardInfo> shard_of(const at::Tensor& parameter);

}  // namespace penstock
