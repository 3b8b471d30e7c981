#include "penstock/models/blocks/input_check.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/tensor_subclass.h"

namespace penstock::models {

std::string shown(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

void check_hidden(const std::string& what, const at::Tensor& x, std::int64_t width) {
  if (!x.defined() || x.dim() != 3 || x.size(2) != width || !x.is_floating_point())
    throw ValueError(describe(what, shown(x), fmt::format("hidden states [batch, length, {}]", width)));
}

void check_ids(const std::string& what, const at::Tensor& ids, at::IntArrayRef sizes,
               const std::string& expected) {
  if (!ids.defined() || ids.sizes() != sizes ||
      (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt))
    throw ValueError(
        describe(what, shown(ids), fmt::format("{} [{}], Long or Int", expected, fmt::join(sizes, ", "))));
}

void check_id_range(const std::string& what, const at::Tensor& ids, std::int64_t first, std::int64_t last,
                    const std::string& remedy) {
  if (!ids.defined() || !ids.device().is_cpu() || is_wrapper(ids) || ids.numel() == 0) return;
  const NoModesGuard real;
  const auto lowest = ids.min().item<std::int64_t>(), highest = ids.max().item<std::int64_t>();
  if (lowest < first || highest > last)
    throw ValueError(describe(what, fmt::format("{}", lowest < first ? lowest : highest),
                              fmt::format("{} to {}", first, last), remedy));
}

at::ScalarType wide_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor own_rows(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor(tensor) ? to_local(tensor) : tensor;
}

}  // namespace penstock::models
