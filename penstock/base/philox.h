// Philox4x32-10, the counter-based generator of all random numbers in Penstock, and the derivation of its
// keys.
//
// A counter-based generator has no state: number i of a stream is a pure function of (stream, i). Random
// numbers therefore do not depend on how tensors are distributed: every rank that holds element i computes
// the same value, in any order, any number of times, on any device.
//
//   const philox::Stream stream = philox::derive(seed, step, microbatch, layer, purpose);
//   // four words, for elements i/4*4 ... i/4*4 + 3
//   const philox::Block block = philox::numbers(stream, i / 4);
//   const philox::u32 word = block.word[i % 4];
//
// Derivation (lo and hi are the halves of a 64-bit number, P(counter; key) is Philox4x32-10):
//
//   a = P(lo step, hi step, lo microbatch, hi microbatch; lo seed, hi seed)
//   b = P(a0 ^ lo layer, a1 ^ hi layer, a2 ^ lo purpose, a3 ^ hi purpose; lo seed, hi seed)
//   block n of the stream = P(lo n, hi n, b2, b3; b0, b1)
//
// P is a bijection of its counter under a fixed key. For one seed, tuples that differ only in (step,
// microbatch) or only in (layer, purpose) therefore always have different streams; others collide with
// probability 2^-128.
//
// This file is also part of the source of the CUDA kernels (compiled at run time): no includes, integers
// only. P matches the published known-answer vectors of Random123 (tests/torch/philox_test.cpp).
#pragma once

#ifdef __CUDACC__
#define PENSTOCK_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined, so that callers compiled for wider vectors vectorize this code too.
#define PENSTOCK_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace penstock::philox {

using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8);

struct Block {
  u32 word[4];
};

PENSTOCK_HOST_DEVICE u32 low(u64 value) { return static_cast<u32>(value); }
PENSTOCK_HOST_DEVICE u32 high(u64 value) { return static_cast<u32>(value >> 32); }

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
PENSTOCK_HOST_DEVICE Block philox4x32(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = u64{0xD2511F53u} * c0;
    const u64 p1 = u64{0xCD9E8D57u} * c2;
    c0 = high(p1) ^ c1 ^ k0;
    c1 = low(p1);
    c2 = high(p0) ^ c3 ^ k1;
    c3 = low(p0);
    k0 += 0x9E3779B9u;  // the golden ratio
    k1 += 0xBB67AE85u;  // the square root of 3, less 1
  }
  return {{c0, c1, c2, c3}};
}

// The random numbers of one key tuple: a key and the upper half of the counter.
struct Stream {
  u32 key[2];
  u32 counter[2];
};

PENSTOCK_HOST_DEVICE Stream derive(u64 seed, u64 step, u64 microbatch, u64 layer, u64 purpose) {
  const Block a = philox4x32(low(step), high(step), low(microbatch), high(microbatch), low(seed), high(seed));
  const Block b = philox4x32(a.word[0] ^ low(layer), a.word[1] ^ high(layer), a.word[2] ^ low(purpose),
                             a.word[3] ^ high(purpose), low(seed), high(seed));
  return {{b.word[0], b.word[1]}, {b.word[2], b.word[3]}};
}

PENSTOCK_HOST_DEVICE Block numbers(const Stream& stream, u64 block) {
  return philox4x32(low(block), high(block), stream.counter[0], stream.counter[1], stream.key[0],
                    stream.key[1]);
}

}  // namespace penstock::philox
