// A shuffle of 0 .. size-1 that is not stored: element i of the shuffled order is computed from (seed,
// stream, i).
//
//   const KeyedPermutation order(1'000'000'000, seed, epoch);
//   order(0);                         // the first of a billion, without a table
//   order.inverse(order(17)) == 17
//
// A Feistel network over the smallest even number of bits that holds the size, iterated until the result is
// in range (fewer than four steps on average). It is a permutation for any round function; the round function
// is Philox, so that different seeds and streams produce unrelated orders. Immutable. Thread safety: any
// thread.
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
  // Four rounds look random to any test; two more cost little.
  static constexpr int kRounds = 6;
  std::uint64_t mixed(int round, std::uint64_t half) const;
  void check(std::uint64_t index) const;

  std::uint64_t size_;
  int half_bits_ = 1;
  std::uint64_t half_mask_ = 1;
  std::array<std::uint32_t, 4> key_{};  // of the Philox stream: key and upper half of the counter
};

}  // namespace penstock::train
