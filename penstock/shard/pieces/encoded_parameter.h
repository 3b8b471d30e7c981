// A gathered parameter that keeps the form it was sent in: to the outside a dense tensor, inside the bytes that each rank encoded.
//
// Views of it are views of the encoded parameter. Every other operator decodes what it takes and gets a plain tensor, which is freed when the
// operator returns, so forward and backward hold one decoded parameter at a time. Results are plain. Writing it is a TypeError.
#pragma once

#include <ATen/core/Tensor.h>

#include "penstock/shard/pieces/extension.h"

namespace penstock {

at::Tensor make_encoded_parameter(const GatheredBytes& bytes);
bool is_encoded_parameter(const at::Tensor& tensor);

// The parameter as a plain dense tensor.
at::Tensor decode_gathered(const GatheredBytes& bytes);

}  // namespace penstock
