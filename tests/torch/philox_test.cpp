#include "penstock/base/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "penstock/torch/random/philox_words.h"

namespace penstock {
namespace philox_test {

using philox::Block;
using philox::u32;
using philox::u64;
using Words = std::array<u32, 4>;

Words words_of(const Block& block) { return {block.word[0], block.word[1], block.word[2], block.word[3]}; }

// The known-answer vectors for philox4x32 with 10 rounds that Random123 publishes.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(words_of(philox::philox4x32(0, 0, 0, 0, 0, 0)),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words_of(philox::philox4x32(~0u, ~0u, ~0u, ~0u, ~0u, ~0u)),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // The digits of pi.
  EXPECT_EQ(
      words_of(philox::philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0)),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The documented derivation on top of Philox as in the paper: an independent second implementation.
Words paper(Words c, std::array<u32, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = 0xD2511F53ull * c[0], right = 0xCD9E8D57ull * c[2];
    c = {static_cast<u32>(right >> 32) ^ c[1] ^ k[0], static_cast<u32>(right),
         static_cast<u32>(left >> 32) ^ c[3] ^ k[1], static_cast<u32>(left)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

TEST(Philox, StreamsAreDerivedAsDocumented) {
  const u64 seed = 0x0123456789abcdefull, step = 0xfedcba9876543210ull, microbatch = ~0ull,
            layer = 0x8000000000000001ull, purpose = 0x100000002ull;
  const auto lo = [](u64 x) { return static_cast<u32>(x); };
  const auto hi = [](u64 x) { return static_cast<u32>(x >> 32); };
  const Words a = paper({lo(step), hi(step), lo(microbatch), hi(microbatch)}, {lo(seed), hi(seed)});
  const Words b = paper({a[0] ^ lo(layer), a[1] ^ hi(layer), a[2] ^ lo(purpose), a[3] ^ hi(purpose)},
                        {lo(seed), hi(seed)});
  const philox::Stream stream = philox::derive(seed, step, microbatch, layer, purpose);
  for (const u64 n : {u64{0}, u64{1}, u64{0xffffffff}, u64{0x100000000}, u64{0x123456789abcdef}})
    EXPECT_EQ(words_of(philox::numbers(stream, n)), paper({lo(n), hi(n), b[2], b[3]}, {b[0], b[1]})) << n;
}

// Pinned values: other implementations of the derivation can be checked against these.
TEST(Philox, StreamsNeverChange) {
  EXPECT_EQ(words_of(philox::numbers(philox::derive(0, 0, 0, 0, 0), 0)),
            (Words{0x26396fdb, 0x900547c1, 0xc36f70e7, 0x16ea3436}));
  EXPECT_EQ(words_of(philox::numbers(philox::derive(42, 7, 3, 12, 1), 5)),
            (Words{0x05da3db4, 0x13fa321c, 0x34066c7e, 0xb7797ed2}));
}

TEST(Philox, NearbyKeysHaveDifferentStreams) {
  std::set<std::tuple<u32, u32, u32, u32>> streams;
  std::size_t keys = 0;
  for (u64 seed = 0; seed < 4; ++seed)
    for (u64 step = 0; step < 8; ++step)
      for (u64 microbatch = 0; microbatch < 8; ++microbatch)
        for (u64 layer = 0; layer < 8; ++layer)
          for (u64 purpose = 0; purpose < 8; ++purpose, ++keys) {
            const auto s = philox::derive(seed, step, microbatch - 1, layer, purpose);
            streams.emplace(s.key[0], s.key[1], s.counter[0], s.counter[1]);
          }
  EXPECT_EQ(streams.size(), keys);
}

// Every bit of the key tuple and of the index flips about half of the bits of the numbers.
TEST(Philox, EveryInputBitMatters) {
  const std::array<u64, 6> base = {42, 7, 3, 12, 1, 1000};
  const auto numbers = [](const std::array<u64, 6>& v) {
    return philox::numbers(philox::derive(v[0], v[1], v[2], v[3], v[4]), v[5]);
  };
  const Block before = numbers(base);
  for (std::size_t part = 0; part < base.size(); ++part) {
    int flipped = 0;
    for (int bit = 0; bit < 64; ++bit) {
      auto changed = base;
      changed[part] ^= u64{1} << bit;
      const Block after = numbers(changed);
      int here = 0;
      for (int i = 0; i < 4; ++i) here += std::popcount(before.word[i] ^ after.word[i]);
      EXPECT_GT(here, 30) << "part " << part << " bit "
                          << bit;  // of 128; 64 is expected, and 30 is six deviations away
      EXPECT_LT(here, 98) << "part " << part << " bit " << bit;
      flipped += here;
    }
    EXPECT_NEAR(flipped, 64 * 64, 5 * 45) << "part " << part;
  }
}

TEST(Philox, VectorsEqualSingleBlocks) {
  const philox::Stream stream = philox::derive(42, 7, 3, 12, 1);
  bool tried = false;
  for (const auto path : {random::CpuPath::Portable, random::CpuPath::Avx2, random::CpuPath::Avx512}) {
    if (!random::supported(path)) continue;
    tried = true;
    // Also around the carry into the upper half of the block number.
    for (const u64 first : {u64{0}, u64{1}, u64{0xffffffe7}, u64{0xffffffffffffffc0}})
      for (const long long blocks : {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 100}) {
        std::vector<u32> words(static_cast<std::size_t>(4 * blocks + random::kWordsSlack + 4), 0xdeadbeef);
        random::fill_words(path, stream, first, blocks, words.data());
        for (long long n = 0; n < blocks; ++n) {
          const Block block = philox::numbers(stream, first + static_cast<u64>(n));
          for (long long i = 0; i < 4; ++i)
            ASSERT_EQ(words[static_cast<std::size_t>(4 * n + i)], block.word[i])
                << "path " << static_cast<int>(path) << " first " << first << " blocks " << blocks << " at "
                << n;
        }
        for (std::size_t i = static_cast<std::size_t>(4 * blocks + random::kWordsSlack); i < words.size();
             ++i)
          ASSERT_EQ(words[i], 0xdeadbeef) << "written after the slack";
      }
  }
  EXPECT_TRUE(tried);
}

}  // namespace philox_test
}  // namespace penstock
