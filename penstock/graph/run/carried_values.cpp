#include "penstock/graph/run/carried_values.h"

#include <ATen/ATen.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>

#include <memory>
#include <utility>

namespace penstock::graph {
namespace {

// The storage of a carrier owns the values in place of memory.
void delete_carried(void* values) { delete static_cast<CarriedValues*>(values); }

}  // namespace

at::Tensor carry(CarriedValues values, at::Device device) {
  auto owned = std::make_unique<CarriedValues>(std::move(values));
  at::DataPtr nothing(nullptr, owned.get(), &delete_carried, device);
  owned.release();
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, std::move(nothing)),
      c10::DispatchKeySet(c10::computeDispatchKey(at::kFloat, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(at::kFloat));
}

std::optional<CarriedValues> take_carried(at::Tensor carrier) {
  if (!carrier.defined() || !carrier.has_storage()) return std::nullopt;
  CarriedValues* values = carrier.storage().data_ptr().cast_context<CarriedValues>(&delete_carried);
  if (!values) return std::nullopt;
  if (carrier.use_count() == 1 && carrier.storage().use_count() == 1) return std::move(*values);
  return *values;
}

}  // namespace penstock::graph
