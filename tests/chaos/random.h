// Random numbers of a trial: the same for a seed with every compiler and standard library (SplitMix64).
#pragma once

#include <cstdint>

namespace penstock::chaos {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t value = state_ += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
  }

  // Both limits are included.
  int whole(int low, int high) {
    return low + static_cast<int>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  double share() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // from 0 to 1, without 1
  double number(double low, double high) { return low + (high - low) * share(); }
  bool chance(double probability) { return share() < probability; }

 private:
  std::uint64_t state_;
};

}  // namespace penstock::chaos
