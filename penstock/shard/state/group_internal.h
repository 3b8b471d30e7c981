// Helpers shared by the files of ShardGroup. Private to this folder.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>

#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/torch/dispatch/any_operator_hook.h"
#include "penstock/torch/dispatch/operator_hook.h"

namespace penstock::detail {

// Operators on parts must neither be recorded nor be seen by hooks.
struct NoHooksOrGradScope {
  NoAnyHookGuard no_any_hook;
  NoHooksGuard no_hooks;
  at::NoGradGuard no_grad;
};

inline std::int64_t item_size(at::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

// This rank's part of a distributed tensor; a plain tensor is returned unchanged.
inline at::Tensor local_of(const at::Tensor& tensor) {
  const DTensorPayload* payload = dtensor_payload(tensor);
  return payload ? payload->local() : tensor;
}

// Copies this rank's part of a whole tensor, according to the spec, into `local`.
void copy_part(const at::Tensor& whole, const DTensorSpec& spec, const at::Tensor& local);

}  // namespace penstock::detail
