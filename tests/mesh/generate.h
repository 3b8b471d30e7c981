// Random values for the property tests of meshes.
#pragma once

#include <rapidcheck.h>

#include <cstdint>
#include <vector>

namespace penstock::test {

// Uniform over the whole range: by default the generator stays near the lower end in its first runs.
template <class Int>
Int number(Int from, Int to) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<Int>(from, to + 1));
}

inline std::vector<std::int64_t> random_shape(int max_ndim = 4, std::int64_t max_size = 4) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(number(1, max_ndim)));
  for (std::int64_t& size : shape) size = number<std::int64_t>(1, max_size);
  return shape;
}

}  // namespace penstock::test
