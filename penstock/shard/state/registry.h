// Finds the group a marked tensor belongs to: parameters by identity, their views and saved copies by memory,
// and tensors computed from shards alone by their own memory.
//
// Private to this folder. Thread safety: may be used from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace penstock {

class ShardGroup;

namespace detail {

// Values of Membership::parameter for tensors that are not parameters.
constexpr int kSharesGroupMemory = -1;  // shares memory with parameters of the group
constexpr int kDerived =
    -2;  // a distributed tensor computed from shards, without gradients: W + B A of an evaluation
// Shares memory that the group used before the dtype of its parameters changed.
constexpr int kStale = -3;

struct Membership {
  ShardGroup* group = nullptr;
  int parameter = kSharesGroupMemory;  // position in the group, or one of the above
};

void register_member(const void* key, Membership member);
void unregister_member(const void* key);
// Marks a distributed tensor for the trigger and remembers it for the lifetime of its memory and the group.
void register_derived(const at::Tensor& tensor, ShardGroup& group);
void unregister_derived(const ShardGroup& group);

// The number of parameters in the process that were given other data and are not adopted yet: almost always
// zero.
void count_replacements(int change);
bool replacements_pending();

// Finds a parameter, a tensor (plain or distributed) over a group's memory, or a derived tensor.
Membership find_member(const at::Tensor& tensor);
// Finds only the parameter itself.
Membership find_parameter(const at::Tensor& tensor);

}  // namespace detail
}  // namespace penstock
