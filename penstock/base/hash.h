// Combines the hashes of the parts of a value. Stable within one process only; never send or store the
// result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace penstock {

class HashBuilder {
 public:
  template <class T>
  HashBuilder& add(const T& part) {
    // splitmix64 over the running value: order matters, and small integers spread over all bits.
    std::uint64_t x = value_ + 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(std::hash<T>{}(part));
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    value_ = x ^ (x >> 31);
    return *this;
  }
  std::size_t value() const { return static_cast<std::size_t>(value_); }

 private:
  std::uint64_t value_ = 0;
};

}  // namespace penstock
