// Which group a marked tensor belongs to: parameters by identity, their views and saved copies by memory, and what was computed from
// shards alone by its own memory.
//
// Private to this folder. Thread rule: any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace penstock {

class ShardGroup;

namespace detail {

// Membership::parameter of tensors that are no parameters.
constexpr int kSharesMemory = -1;  // with parameters of the group
constexpr int kDerived = -2;       // a distributed tensor computed from shards, without gradients: W + B A of an evaluation
constexpr int kStale = -3;         // shares memory that the group had before the dtype of its parameters changed

struct Membership {
  ShardGroup* group = nullptr;
  int parameter = kSharesMemory;  // position in the group, or one of the above
};

void register_member(const void* key, Membership member);
void unregister_member(const void* key);
// Marks a distributed tensor for the trigger and remembers it, as long as its memory lives and the group does.
void register_derived(const at::Tensor& tensor, ShardGroup& group);
void unregister_derived(const ShardGroup& group);

// How many parameters of the process have been given other data and are not taken over yet: none, almost always.
void count_replacements(int change);
bool replacements_pending();

// Of a parameter, or of a tensor (plain or distributed) over a group's memory, or of a derived one.
Membership find_member(const at::Tensor& tensor);
// Of the parameter itself alone.
Membership find_parameter(const at::Tensor& tensor);

}  // namespace detail
}  // namespace penstock
