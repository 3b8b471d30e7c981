// Short descriptions of tensors and sizes, for messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string>

namespace penstock {

// "[2, 3]"
std::string shape_text(c10::IntArrayRef sizes);

// "float32[2, 3]". Never computes; for a tensor without plain sizes (nested, symbolic), only its type.
std::string describe_tensor(const at::Tensor& tensor);

}  // namespace penstock
