#include "penstock/torch/tree/tensor_text.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "penstock/torch/compat/dtype.h"

namespace penstock {

std::string shape_text(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (std::size_t i = 0; i < sizes.size(); ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", sizes[i]);
  return text + ']';
}

std::string describe_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined tensor";
  const std::string type = dtype_name(tensor.scalar_type());
  try {
    return type + shape_text(tensor.sizes());
  } catch (const c10::Error&) {
    return type + "[?]";  // symbolic or nested: it has no plain sizes
  }
}

}  // namespace penstock
