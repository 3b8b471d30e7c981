#include "penstock/graph/compiler/strided_copy.h"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <cstdint>
#include <cstring>

namespace penstock::graph {
namespace {

struct Dim {
  std::int64_t size = 0, stride = 0;
};
// Without dims of size 1, and with neighbours that are one dim in memory joined; the innermost last.
using Dims = c10::SmallVector<Dim, 6>;

Dims joined(at::IntArrayRef sizes, at::IntArrayRef strides) {
  Dims dims;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    if (!dims.empty() && dims.back().stride == sizes[i] * strides[i])
      dims.back() = {dims.back().size * sizes[i], strides[i]};
    else
      dims.push_back({sizes[i], strides[i]});
  }
  return dims;
}

struct Bytes16 {
  std::uint64_t words[2];
};

// Copies with an innermost dim that is contiguous.
struct Runs {
  explicit Runs(std::size_t of) : bytes(of) {}
  void operator()(const char* from, char*& to) const {
    // Lengths that are known to the compiler are copied without a call.
    switch (bytes) {
      case 16:
        std::memcpy(to, from, 16);
        break;
      case 32:
        std::memcpy(to, from, 32);
        break;
      case 64:
        std::memcpy(to, from, 64);
        break;
      default:
        std::memcpy(to, from, bytes);
    }
    to += bytes;
  }
  std::size_t bytes;
};

// Copies an innermost dim with a stride.
template <class Item>
struct Strided {
  void operator()(const char* from, char*& to) const {
    const Item* source = reinterpret_cast<const Item*>(from);
    Item* target = reinterpret_cast<Item*>(to);
    for (std::int64_t i = 0; i < inner.size; ++i) target[i] = source[i * inner.stride];
    to += static_cast<std::size_t>(inner.size) * sizeof(Item);
  }
  Dim inner;
};

// Calls `copy` for the places of the first `depth` dims.
template <class Copy>
void for_each_place(const Dim* dims, std::size_t depth, const char* from, char*& to, std::int64_t item_bytes,
                    const Copy& copy) {
  if (depth == 0) return copy(from, to);
  const std::int64_t step = dims->stride * item_bytes;
  for (std::int64_t i = 0; i < dims->size; ++i, from += step)
    for_each_place(dims + 1, depth - 1, from, to, item_bytes, copy);
}

template <class Item>
void copy_strided(const Dims& dims, const char* from, char* to) {
  for_each_place(dims.data(), dims.size() - 1, from, to, sizeof(Item), Strided<Item>{dims.back()});
}

}  // namespace

bool copy_to_contiguous(const at::Tensor& from, at::IntArrayRef sizes, at::IntArrayRef strides, void* to) {
  constexpr std::int64_t kItemsForThreads = 32768, kLargeTranspose = 60 * 60;
  const std::int64_t items = c10::multiply_integers(sizes);
  if (items == 0) return true;
  if (items >= kItemsForThreads && at::get_num_threads() > 1) return false;
  const Dims dims = joined(sizes, strides);
  const auto item_bytes = static_cast<std::int64_t>(from.element_size());
  const char* source = static_cast<const char*>(from.data_ptr());
  char* target = static_cast<char*>(to);
  if (dims.empty() || dims.back().stride == 1) {
    const std::int64_t run = dims.empty() ? 1 : dims.back().size;
    for_each_place(dims.data(), dims.empty() ? 0 : dims.size() - 1, source, target, item_bytes,
                   Runs(static_cast<std::size_t>(run * item_bytes)));
    return true;
  }
  if (dims.size() == 2 && dims[0].stride == 1 && items >= kLargeTranspose) return false;
  switch (item_bytes) {
    case 1:
      copy_strided<std::uint8_t>(dims, source, target);
      return true;
    case 2:
      copy_strided<std::uint16_t>(dims, source, target);
      return true;
    case 4:
      copy_strided<std::uint32_t>(dims, source, target);
      return true;
    case 8:
      copy_strided<std::uint64_t>(dims, source, target);
      return true;
    case 16:
      copy_strided<Bytes16>(dims, source, target);
      return true;
    default:
      return false;
  }
}

}  // namespace penstock::graph
