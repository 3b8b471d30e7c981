#include "penstock/torch/scan/document_starts.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdint>
#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock {

void check_documents(const char* what, const at::Tensor& documents, std::int64_t batch, std::int64_t length) {
  if (!at::isIntegralType(documents.scalar_type(), /*includeBool=*/false))
    throw ValueError(describe(fmt::format("{}: documents", what), dtype_name(documents.scalar_type()),
                              "integers", "number the documents of a row 0, 1, 2, ..."));
  if (documents.dim() != 2 || documents.size(0) != batch || documents.size(1) != length)
    throw ValueError(describe(fmt::format("{}: documents", what),
                              fmt::format("{} dims, {} numbers", documents.dim(), documents.numel()),
                              fmt::format("[{}, {}], one number per token", batch, length)));
}

at::Tensor document_starts(const at::Tensor& documents) {
  const std::int64_t batch = documents.size(0), length = documents.size(1);
  const auto options = documents.options().dtype(at::kInt);
  if (length < 2) return at::full({batch, length}, -1, options);
  const at::Tensor changed = documents.narrow(1, 1, length - 1).ne(documents.narrow(1, 0, length - 1));
  const at::Tensor positions = at::arange(1, length, options).expand({batch, length - 1});
  const at::Tensor marked = at::cat(
      {at::full({batch, 1}, -1, options), at::where(changed, positions, at::full({}, -1, options))}, 1);
  return std::get<0>(at::cummax(marked, 1)).contiguous();
}

}  // namespace penstock
