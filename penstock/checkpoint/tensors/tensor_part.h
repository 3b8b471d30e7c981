// A rank's part of a named tensor, for saving and loading.
//
//   std::vector<TensorPart> parts;
//   for (auto& parameter : module->named_parameters()) parts.push_back(tensor_part(parameter.key(), parameter.value()));
//
// A distributed tensor gives the part that this rank holds, in whatever placements; a plain one is held whole, here and maybe on
// other ranks, too. The names are global: the same in every layout. Parts share memory with their tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "penstock/checkpoint/files/safetensors.h"
#include "penstock/checkpoint/files/slice.h"

namespace penstock::checkpoint {

struct TensorPart {
  std::string name;
  Slice slice;       // of the whole tensor; no boxes on a rank that holds nothing
  at::Tensor local;  // plain, detached, of slice.local_shape, on any device, of any strides
};

// Throws ValueError for Partial placements (the terms are no values yet: redistribute first), and for tensors without plain values
// (sparse, quantized, meta, undefined).
TensorPart tensor_part(std::string name, const at::Tensor& tensor);

// The format's name of an element type; nothing where it has none (complex128, quantized, ...).
std::optional<Dtype> to_dtype(at::ScalarType dtype);
// Nothing where this LibTorch is older than the type.
std::optional<at::ScalarType> to_scalar_type(Dtype dtype);

}  // namespace penstock::checkpoint
