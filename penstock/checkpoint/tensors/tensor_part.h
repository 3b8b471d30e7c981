// A rank's part of a named tensor, for saving and loading.
//
//   std::vector<TensorPart> parts;
//   for (auto& parameter : module->named_parameters())
//     parts.push_back(tensor_part(parameter.key(), parameter.value()));
//
// For a distributed tensor, the part that this rank holds, in any placements; a plain tensor is held whole,
// possibly on several ranks. Names are global: the same in every layout. Parts share memory with their
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "penstock/checkpoint/files/safetensors.h"
#include "penstock/checkpoint/files/slice.h"

namespace penstock::checkpoint {

struct TensorPart {
  std::string name;
  Slice slice;       // of the whole tensor; no boxes if the rank holds nothing
  at::Tensor local;  // plain, detached, shape slice.local_shape, any device and strides
};

// Throws ValueError for Partial placements (the terms are not values yet: redistribute first), and for
// tensors without plain values (sparse, quantized, meta, undefined).
TensorPart tensor_part(std::string name, const at::Tensor& tensor);

// Returns the format's name of an element type, or std::nullopt if it has none (complex128, quantized, ...).
std::optional<Dtype> to_dtype(at::ScalarType dtype);
// Returns std::nullopt if this LibTorch does not have the type.
std::optional<at::ScalarType> to_scalar_type(Dtype dtype);

}  // namespace penstock::checkpoint
