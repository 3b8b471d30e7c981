// The sigmoids of rows, a tile at a time, so that those of one tile stay in the second-level cache.
// Private to this folder.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "penstock/torch/experts/expert_rows_cpu.h"

namespace penstock::detail {

constexpr std::int64_t kTileElements = 32 * 1024;
// LibTorch computes what is left after the last whole vector with another exponential. Rows are therefore
// padded: the bits of a sigmoid depend neither on its place nor on the number of threads.
constexpr std::int64_t kVectorElements = 64;

// Calls body(first row, number of rows, sigmoids of gate) for tiles of whole rows, from several threads.
// `gate`: a matrix whose rows are contiguous.
template <class Element, class Body>
void for_each_gate_tile(const at::Tensor& gate, const Body& body) {
  using Sum = RowSum<Element>;
  const std::int64_t rows = gate.size(0), width = gate.size(1), stride = gate.stride(0);
  const Element* values = gate.data_ptr<Element>();
  const std::int64_t tile = std::max<std::int64_t>(1, kTileElements / std::max<std::int64_t>(1, width));
  at::parallel_for(0, (rows + tile - 1) / tile, 1, [&](std::int64_t begin, std::int64_t end) {
    // LibTorch's own sigmoid, for its vectorized exponential; autocast would change its dtype.
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto padded = [](std::int64_t elements) {
      return (elements + kVectorElements - 1) / kVectorElements * kVectorElements;
    };
    std::vector<Sum> shares(static_cast<std::size_t>(padded(std::min(tile, rows) * width)));
    for (std::int64_t number = begin; number < end; ++number) {
      const std::int64_t first = number * tile, count = std::min(tile, rows - first);
      for (std::int64_t row = 0; row < count; ++row)
        std::copy_n(values + (first + row) * stride, width, shares.data() + row * width);
      at::Tensor view =
          at::from_blob(shares.data(), {padded(count * width)}, c10::CppTypeToScalarType<Sum>::value);
      at::sigmoid_out(view, view);
      body(first, count, static_cast<const Sum*>(shares.data()));
    }
  });
}

}  // namespace penstock::detail
