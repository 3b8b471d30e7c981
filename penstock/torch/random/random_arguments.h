// Checks the arguments of a random operator and builds the job from them. Internal to penstock/torch.
#pragma once

#include <ATen/ATen.h>

#include "penstock/torch/random/random_job.h"

namespace penstock::random {

// The arguments that all random operators share.
struct DrawArguments {
  const char* operation;  // for errors
  at::IntArrayRef key;
  at::IntArrayRef global_shape;
  at::IntArrayRef offset;
};

// Throws ValueError if the key does not have five parts, or if the box is not inside the global shape.
void check_draw_arguments(const DrawArguments& given, at::IntArrayRef sizes);

// Throws TypeError if the kind of draw does not support this dtype. `in_double` requires float64.
void check_dtype(const DrawArguments& given, Kind kind, at::ScalarType dtype, bool in_double);

// Returns the job that fills `out` (reading `in`, for dropout). Both must have the same sizes and dtype; the
// arguments must have been checked. Dims that are contiguous with each other in the global tensor and in
// memory are merged.
RandomJob make_job(const DrawArguments& given, Kind kind, const AnyConstants& constants,
                   const at::Tensor& out, const at::Tensor& in = {});

}  // namespace penstock::random
