#include "penstock/train/data/keyed_permutation.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/base/philox.h"  // plain integers: nothing of Torch in it
#include "penstock/errors.h"

namespace penstock::train {

namespace {

// Distinguishes this use of a seed from all others.
constexpr std::uint64_t kShufflePurpose = 0x53485546464C45ULL;

}  // namespace

KeyedPermutation::KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream)
    : size_(size) {
  if (size < 1 || size > std::uint64_t{1} << 62)
    throw ValueError(describe("size of a permutation", fmt::format("{}", size), "a number from 1 to 2^62"));
  while (size > std::uint64_t{1} << (2 * half_bits_)) ++half_bits_;
  half_mask_ = (std::uint64_t{1} << half_bits_) - 1;
  const philox::Stream numbers = philox::derive(seed, stream, 0, 0, kShufflePurpose);
  key_ = {numbers.key[0], numbers.key[1], numbers.counter[0], numbers.counter[1]};
}

std::uint64_t KeyedPermutation::mixed(int round, std::uint64_t half) const {
  const philox::Block block =
      philox::philox4x32(static_cast<std::uint32_t>(half), static_cast<std::uint32_t>(round), key_[2],
                         key_[3], key_[0], key_[1]);
  return block.word[0] & half_mask_;  // a half has at most 31 bits
}

void KeyedPermutation::check(std::uint64_t index) const {
  if (index >= size_)
    throw ValueError(describe("index of a permutation", fmt::format("{}", index),
                              fmt::format("a number below {}", size_)));
}

std::uint64_t KeyedPermutation::operator()(std::uint64_t index) const {
  check(index);
  do {
    std::uint64_t left = index >> half_bits_;
    std::uint64_t right = index & half_mask_;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ mixed(round, right);
      left = right;
      right = next;
    }
    index = left << half_bits_ | right;
  } while (index >= size_);
  return index;
}

std::uint64_t KeyedPermutation::inverse(std::uint64_t value) const {
  check(value);
  do {
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & half_mask_;
    for (int round = kRounds; round-- > 0;) {
      const std::uint64_t before = right ^ mixed(round, left);
      right = left;
      left = before;
    }
    value = left << half_bits_ | right;
  } while (value >= size_);
  return value;
}

}  // namespace penstock::train
