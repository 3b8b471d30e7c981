// From the arguments of an operator to a job: checks, and the walk over the box. Internal to penstock/torch.
#pragma once

#include <ATen/ATen.h>

#include "penstock/torch/random/random_job.h"

namespace penstock::random {

// What all operators share, as they take it.
struct DrawArguments {
  const char* operation;  // for errors
  at::IntArrayRef key;
  at::IntArrayRef global_shape;
  at::IntArrayRef offset;
};

// Throws ValueError when the key has not five parts, or when the box does not lie in the global shape.
void check_draw_arguments(const DrawArguments& given, at::IntArrayRef sizes);

// Throws TypeError unless the kind of draw can give this dtype. `in_double` needs float64.
void check_dtype(const DrawArguments& given, Kind kind, at::ScalarType dtype, bool in_double);

// The job that fills `out` (reading `in`, for dropout). Both must have the same sizes and dtype; the arguments have been checked.
// Dims that continue each other in the global tensor and in memory are walked as one.
RandomJob make_job(const DrawArguments& given, Kind kind, const AnyConstants& constants, const at::Tensor& out, const at::Tensor& in = {});

}  // namespace penstock::random
