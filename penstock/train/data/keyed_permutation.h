// A shuffle of 0 .. size-1 that is never stored: place i of the shuffled order is computed from (seed, stream, i) alone.
//
//   const KeyedPermutation order(1'000'000'000, seed, epoch);
//   order(0);                         // the first of a billion; no table is made
//   order.inverse(order(17)) == 17
//
// A Feistel network over the least even number of bits that holds the size, walked until it lands inside (less than four
// steps on average). It is a permutation whatever the round function; the round function is Philox, so that other seeds
// and other streams give unrelated orders. Immutable; any thread.
#pragma once

#include <array>
#include <cstdint>

namespace penstock::train {

class KeyedPermutation {
 public:
  // Throws ValueError for a size of 0 or above 2^62.
  KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream);

  std::uint64_t size() const { return size_; }
  // Throws ValueError for an index that is not below the size.
  std::uint64_t operator()(std::uint64_t index) const;
  std::uint64_t inverse(std::uint64_t value) const;

 private:
  // Four are enough to look random to any test; two more cost little.
  static constexpr int kRounds = 6;
  std::uint64_t mixed(int round, std::uint64_t half) const;
  void check(std::uint64_t index) const;

  std::uint64_t size_;
  int half_bits_ = 1;
  std::uint64_t half_mask_ = 1;
  std::array<std::uint32_t, 4> key_{};  // of the Philox stream: key and upper half of the counter
};

}  // namespace penstock::train
