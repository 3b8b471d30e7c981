#include "penstock/checkpoint/tensors/tensor_part.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/mesh/local_shard.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::checkpoint {

namespace {

// By name, because older LibTorch versions lack some of the types.
constexpr auto kNames = std::to_array<std::pair<std::string_view, Dtype>>({{"bool", Dtype::Bool},
                                                                           {"uint8", Dtype::U8},
                                                                           {"int8", Dtype::I8},
                                                                           {"float8_e5m2", Dtype::F8E5M2},
                                                                           {"float8_e4m3fn", Dtype::F8E4M3},
                                                                           {"float8_e8m0fnu", Dtype::F8E8M0},
                                                                           {"int16", Dtype::I16},
                                                                           {"uint16", Dtype::U16},
                                                                           {"float16", Dtype::F16},
                                                                           {"bfloat16", Dtype::BF16},
                                                                           {"int32", Dtype::I32},
                                                                           {"uint32", Dtype::U32},
                                                                           {"float32", Dtype::F32},
                                                                           {"complex64", Dtype::C64},
                                                                           {"float64", Dtype::F64},
                                                                           {"int64", Dtype::I64},
                                                                           {"uint64", Dtype::U64}});

}  // namespace

std::optional<Dtype> to_dtype(at::ScalarType dtype) {
  const auto number = dtype_number(dtype);
  if (!number) return std::nullopt;
  for (const auto& [name, code] : kNames)
    if (find_dtype(*number)->name == name) return code;
  return std::nullopt;
}

std::optional<at::ScalarType> to_scalar_type(Dtype dtype) {
  for (const auto& [name, code] : kNames)
    if (code == dtype)
      for (const DtypeEntry& entry : dtype_table())
        if (entry.name == name) return entry.here;
  return std::nullopt;
}

TensorPart tensor_part(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined())
    throw ValueError(
        describe("part of a checkpoint: " + name, "an undefined tensor", "a tensor with values"));
  if (!to_dtype(tensor.scalar_type()))
    throw ValueError(describe("part of a checkpoint: " + name, dtype_name(tensor.scalar_type()),
                              "an element type that safetensors supports", "convert it first"));
  at::NoGradGuard no_grad;
  ensure_sharded(tensor);
  TensorPart part;
  part.name = std::move(name);
  if (is_dtensor(tensor)) {
    for (const Placement& placement : placements_of(tensor))
      if (placement.is_partial())
        throw ValueError(describe("part of a checkpoint: " + part.name,
                                  fmt::format("placements {}", to_string(placements_of(tensor))),
                                  "no Partial: a term is not a value", "redistribute it first"));
    const comm::MeshGroups& mesh = mesh_of(tensor);
    const auto shape = tensor.sizes().vec();
    part.local = to_local(tensor).detach();
    part.slice = {shape, part.local.sizes().vec(), local_boxes(shape, mesh.mesh(), placements_of(tensor))};
  } else {
    part.local = tensor.detach();
    part.slice = Slice::whole(tensor.sizes().vec());
  }
  if (part.local.layout() != at::kStrided || part.local.is_meta())
    throw ValueError(describe("part of a checkpoint: " + part.name, "a tensor without plain values in memory",
                              "a strided tensor on a device", "materialize or convert it first"));
  return part;
}

}  // namespace penstock::checkpoint
