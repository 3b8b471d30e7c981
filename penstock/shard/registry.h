// Which group a marked tensor belongs to: parameters by identity, their views and saved copies by memory.
//
// Private to this folder. Thread rule: any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace penstock {

class ParameterGroup;

namespace detail {

struct Membership {
  ParameterGroup* group = nullptr;
  int parameter = -1;  // position in the group; -1 for a tensor that only shares memory with one
};

void register_member(const void* key, Membership member);
void unregister_member(const void* key);
// Of a parameter, or of a tensor (plain or distributed) over a group's memory.
Membership find_member(const at::Tensor& tensor);
// Of the parameter itself alone.
Membership find_parameter(const at::Tensor& tensor);

}  // namespace detail
}  // namespace penstock
