// Rotary position embeddings (RoPE): neighbouring elements 2i, 2i + 1 of a query or key are a point in the
// plane, rotated by position * theta^(-2i / head width). The product of a query and a key then depends only
// on the distance of their positions.
//
//   Rotary rotary(head_width, context, 10000);
//   const at::Tensor turns = rotary.turns(first, length, x);          // once for all layers of a forward
//   q = rotate(q, turns);                                             // [batch, length, heads, head width]
//
// Angles are computed in float64 and kept as complex numbers, float32 or float64 like the model. The table
// for a device is made on first use (that copy waits for the device); fake tensors of an absent device get
// fake tables. Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>

namespace penstock::models {

class Rotary {
 public:
  Rotary(std::int64_t head_width, std::int64_t context, double theta);

  // Returns complex [length, 1, head_width / 2] for the positions first, first + 1, ..., on the device of
  // `like`, in float64 if `like` is. Throws ValueError for positions outside the context.
  at::Tensor turns(std::int64_t first, std::int64_t length, const at::Tensor& like);

 private:
  const at::Tensor& table_for(const at::Tensor& like, at::Tensor& fake);

  std::int64_t context_;
  at::Tensor angles_;  // float64 [context, head_width / 2]
  std::map<std::pair<at::Device, at::ScalarType>, at::Tensor,
           bool (*)(const std::pair<at::Device, at::ScalarType>&,
                    const std::pair<at::Device, at::ScalarType>&)>
      tables_;
};

// x [batch, length, heads, head width] of any floating dtype; 16-bit types are rotated in float32 and rounded
// once.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& turns);

}  // namespace penstock::models
