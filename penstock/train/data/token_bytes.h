// Numbers from bytes of files. Little-endian, like every machine that LibTorch runs on; places need no alignment.
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

// out.size() numbers of type T that lie one after the other.
template <class T>
void widen(const std::uint8_t* from, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::int64_t>(number_from<T>(from + i * sizeof(T)));
}

}  // namespace penstock::train
