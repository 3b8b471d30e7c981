// A gathered parameter that keeps the encoding it was sent in: externally a dense tensor, internally the
// bytes of each rank.
//
// Views of it are views of the encoded parameter. Every other operator decodes its arguments to plain
// tensors, which are freed when the operator returns, so forward and backward hold one decoded parameter at a
// time. Results are plain. Writing to it is a TypeError.
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/shard_options.h"

namespace penstock {

at::Tensor make_encoded_parameter(const GatheredBytes& bytes);
bool is_encoded_parameter(const at::Tensor& tensor);

// The parameter as a plain dense tensor.
at::Tensor decode_gathered(const GatheredBytes& bytes);

}  // namespace penstock
