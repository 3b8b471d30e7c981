// The part of a memory that a tensor occupies, from its first element to its last.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "penstock/graph.h"

namespace penstock::graph {

// In bytes from the beginning of the memory. A range without bytes is the default one.
struct ByteRange {
  std::int64_t first = std::numeric_limits<std::int64_t>::max(), end = 0;

  void add(const ByteRange& other) {
    first = std::min(first, other.first);
    end = std::max(end, other.end);
  }
  bool operator==(const ByteRange&) const = default;
};

inline ByteRange byte_range(at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t storage_offset,
                            std::int64_t item_bytes) {
  std::int64_t last = storage_offset;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return {};
    last += (sizes[dim] - 1) * strides[dim];
  }
  return {storage_offset * item_bytes, (last + 1) * item_bytes};
}

inline ByteRange byte_range(const Geometry& geometry) {
  return byte_range(geometry.sizes, geometry.strides, geometry.storage_offset,
                    static_cast<std::int64_t>(c10::elementSize(geometry.dtype)));
}

inline ByteRange byte_range(const at::Tensor& tensor) {
  return byte_range(tensor.sizes(), tensor.strides(), tensor.storage_offset(),
                    static_cast<std::int64_t>(tensor.itemsize()));
}

}  // namespace penstock::graph
