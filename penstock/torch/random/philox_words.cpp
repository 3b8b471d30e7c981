#include "penstock/torch/random/philox_words.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <cstring>

namespace penstock::random {

namespace {

using philox::u32;
using philox::u64;

void fill_one_by_one(const philox::Stream& stream, u64 block, long long blocks, u32* words) {
  for (long long i = 0; i < blocks; ++i) {
    const philox::Block numbers = philox::numbers(stream, block + static_cast<u64>(i));
    std::memcpy(words + 4 * i, numbers.word, sizeof numbers.word);
  }
}

#ifdef __x86_64__

// 64-bit lanes hold 32-bit numbers: the instruction that multiplies the lower halves of the lanes leaves both
// halves of the product where they are needed, and the remains in the upper halves are never read. The
// compiler does not find this by itself. Four independent vectors hide the latency of the multiplication.
constexpr int kVectors = 4;

template <int lanes>
struct LanesOf {
  typedef u64 Vector __attribute__((vector_size(8 * lanes)));
};

// One group of kVectors * lanes blocks. Macros, because intrinsics cannot be inlined through a function
// compiled for another instruction set, as a template for both would be.
#define PENSTOCK_PHILOX_GROUP(lanes, multiply, interleave)                                 \
  using V = LanesOf<lanes>::Vector;                                                        \
  V index = {};                                                                            \
  for (int lane = 0; lane < (lanes); ++lane) index[lane] = block + static_cast<u64>(lane); \
  V c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];                                \
  _Pragma("GCC unroll 4") for (int v = 0; v < kVectors; ++v) {                             \
    c0[v] = index + static_cast<u64>(v * (lanes));                                         \
    c1[v] = c0[v] >> 32;                                                                   \
    c2[v] = V{} + stream.counter[0];                                                       \
    c3[v] = V{} + stream.counter[1];                                                       \
  }                                                                                        \
  V k0 = V{} + stream.key[0], k1 = V{} + stream.key[1];                                    \
  const V m0 = V{} + 0xD2511F53u, m1 = V{} + 0xCD9E8D57u;                                  \
  _Pragma("GCC unroll 10") for (int round = 0; round < 10; ++round) {                      \
    _Pragma("GCC unroll 4") for (int v = 0; v < kVectors; ++v) {                           \
      const V p0 = multiply(m0, c0[v]), p1 = multiply(m1, c2[v]);                          \
      c0[v] = (p1 >> 32) ^ c1[v] ^ k0;                                                     \
      c1[v] = p1;                                                                          \
      c2[v] = (p0 >> 32) ^ c3[v] ^ k1;                                                     \
      c3[v] = p0;                                                                          \
    }                                                                                      \
    k0 += 0x9E3779B9u;                                                                     \
    k1 += 0xBB67AE85u;                                                                     \
  }                                                                                        \
  _Pragma("GCC unroll 4") for (int v = 0; v < kVectors; ++v) {                             \
    const V first = (c0[v] & 0xffffffffull) | (c1[v] << 32),                               \
            second = (c2[v] & 0xffffffffull) | (c3[v] << 32);                              \
    interleave(first, second, words + 4 * (lanes)*v)                                       \
  }

#define PENSTOCK_MULTIPLY_128(a, b) \
  reinterpret_cast<V>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)))
#define PENSTOCK_MULTIPLY_256(a, b) \
  reinterpret_cast<V>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)))
#define PENSTOCK_MULTIPLY_512(a, b) \
  reinterpret_cast<V>(              \
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)))
#define PENSTOCK_INTERLEAVE_128(a, b, target)           \
  {                                                     \
    const V low = __builtin_shufflevector(a, b, 0, 2);  \
    const V high = __builtin_shufflevector(a, b, 1, 3); \
    std::memcpy(target, &low, sizeof low);              \
    std::memcpy((target) + 4, &high, sizeof high);      \
  }
#define PENSTOCK_INTERLEAVE_256(a, b, target)                 \
  {                                                           \
    const V low = __builtin_shufflevector(a, b, 0, 4, 1, 5);  \
    const V high = __builtin_shufflevector(a, b, 2, 6, 3, 7); \
    std::memcpy(target, &low, sizeof low);                    \
    std::memcpy((target) + 8, &high, sizeof high);            \
  }
#define PENSTOCK_INTERLEAVE_512(a, b, target)                                 \
  {                                                                           \
    const V low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);    \
    const V high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); \
    std::memcpy(target, &low, sizeof low);                                    \
    std::memcpy((target) + 16, &high, sizeof high);                           \
  }

void group_sse2(const philox::Stream& stream, u64 block, u32* words) {  // every x86-64 processor has it
  PENSTOCK_PHILOX_GROUP(2, PENSTOCK_MULTIPLY_128, PENSTOCK_INTERLEAVE_128)
}
__attribute__((target("avx2"))) void group_avx2(const philox::Stream& stream, u64 block, u32* words) {
  PENSTOCK_PHILOX_GROUP(4, PENSTOCK_MULTIPLY_256, PENSTOCK_INTERLEAVE_256)
}
__attribute__((target("avx512f"))) void group_avx512(const philox::Stream& stream, u64 block, u32* words) {
  PENSTOCK_PHILOX_GROUP(8, PENSTOCK_MULTIPLY_512, PENSTOCK_INTERLEAVE_512)
}

// Whole groups, then one more group for the rest, unless it is so small that single blocks are faster.
void fill_groups(void (*group)(const philox::Stream&, u64, u32*), long long group_blocks,
                 const philox::Stream& stream, u64 block, long long blocks, u32* words) {
  static_assert(kWordsSlack >= 4 * kVectors * 8);
  while (blocks * 4 > group_blocks) {
    group(stream, block, words);
    block += static_cast<u64>(group_blocks);
    words += 4 * group_blocks;
    blocks -= group_blocks;
  }
  fill_one_by_one(stream, block, blocks, words);  // none if negative
}

#endif

}  // namespace

bool supported(CpuPath path) {
#ifdef __x86_64__
  if (path == CpuPath::Avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (path == CpuPath::Avx2) return __builtin_cpu_supports("avx2");
#endif
  return path == CpuPath::Portable;
}

CpuPath best_cpu_path() {
  static const CpuPath best = supported(CpuPath::Avx512) ? CpuPath::Avx512
                              : supported(CpuPath::Avx2) ? CpuPath::Avx2
                                                         : CpuPath::Portable;
  return best;
}

void fill_words(CpuPath path, const philox::Stream& stream, u64 first_block, long long blocks, u32* words) {
#ifdef __x86_64__
  switch (path) {
    case CpuPath::Avx512:
      return fill_groups(group_avx512, kVectors * 8, stream, first_block, blocks, words);
    case CpuPath::Avx2:
      return fill_groups(group_avx2, kVectors * 4, stream, first_block, blocks, words);
    case CpuPath::Portable:
      return fill_groups(group_sse2, kVectors * 2, stream, first_block, blocks, words);
  }
#endif
  fill_one_by_one(stream, first_block, blocks, words);
}

}  // namespace penstock::random
