// Reads numbers from bytes of files. Little-endian, like every machine that LibTorch supports; no alignment
// is required.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace penstock::train {

template <class T>
T number_from(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Reads out.size() consecutive numbers of type T.
template <class T>
void widen(const std::uint8_t* from, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::int64_t>(number_from<T>(from + i * sizeof(T)));
}

}  // namespace penstock::train
