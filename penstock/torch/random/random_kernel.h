// The walk over a box of a global tensor, and the part of it that one device thread does. Shared by host and
// device.
//
// A local tensor is a box of a global one. Its elements form rows: runs whose global indices are consecutive.
// A row is cut where Philox blocks start, so that one call of Philox serves the four (float64 draws: two)
// elements of a block.
//
// This file is also the source text of the CUDA kernels. Compiled with PENSTOCK_RANDOM_KIND, _REAL, _WORD and
// _ELEMENT defined, it is the kernel `penstock_random` for that combination.
#pragma once

#include "penstock/torch/random/random_math.h"

namespace penstock::random {

using i64 = long long;

// Dims are ordered from the innermost; dim 0 is the row, whose global stride is 1. Strides count elements.
struct BoxWalk {
  static constexpr int kMaxDims = 16;
  int dims = 1;
  i64 size[kMaxDims] = {};
  i64 global_stride[kMaxDims] = {};
  i64 out_stride[kMaxDims] = {};
  i64 in_stride[kMaxDims] = {};
  i64 start = 0;           // global index of the first element
  i64 rows = 0;            // product of the sizes from dim 1 on; 0 if there are no elements
  i64 blocks_per_row = 0;  // Philox blocks that a row can touch
};

// The start of a row: its global index and its offsets in `out` and `in`.
struct RowStart {
  i64 global;
  i64 out;
  i64 in;
};

PENSTOCK_HOST_DEVICE RowStart row_start(const BoxWalk& walk, i64 row) {
  RowStart start{walk.start, 0, 0};
  for (int dim = 1; dim < walk.dims; ++dim) {
    // 64-bit division is slow on devices; few boxes have more than 2^32 rows.
    i64 quotient;
    if ((row >> 32) == 0 && (walk.size[dim] >> 32) == 0) {
      quotient = static_cast<i64>(static_cast<u32>(row) / static_cast<u32>(walk.size[dim]));
    } else {
      quotient = row / walk.size[dim];
    }
    const i64 position = row - quotient * walk.size[dim];
    start.global += position * walk.global_stride[dim];
    start.out += position * walk.out_stride[dim];
    start.in += position * walk.in_stride[dim];
    row = quotient;
  }
  return start;
}

// Elements that one Philox block serves when an element takes a Word.
template <class Word>
inline constexpr int kPerBlock = 16 / sizeof(Word);

// The word of an element of a block. Float64 draws join two words, the first one as the upper half.
template <class Word>
PENSTOCK_HOST_DEVICE Word word_of(const philox::Block& block, int element) {
  if constexpr (sizeof(Word) == 4) {
    return block.word[element];
  } else {
    return (static_cast<u64>(block.word[2 * element]) << 32) | block.word[2 * element + 1];
  }
}

template <Kind kind, class Real, class Word, class Element>
PENSTOCK_HOST_DEVICE void write_element(Word word, const Constants<Real, Word>& constants, Element& out,
                                        const Element* in) {
  if constexpr (kind == Kind::Dropout) {
    store(dropout(word, load(*in), constants), out);
  } else {
    store(draw<kind>(word, constants), out);
  }
}

// A whole block of elements, loaded and stored as a unit.
template <class Element, int count>
struct alignas(sizeof(Element) * count) Pack {
  Element element[count];
};

template <class Pack>
PENSTOCK_HOST_DEVICE bool aligned(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % sizeof(Pack) == 0;
}

// The work of thread `thread` of `threads`: every threads-th block of the box.
template <Kind kind, class Real, class Word, class Element>
PENSTOCK_HOST_DEVICE void walk_blocks(const BoxWalk& walk, const philox::Stream& stream,
                                      const Constants<Real, Word>& constants, Element* out, const Element* in,
                                      i64 thread, i64 threads) {
  constexpr int kCount = kPerBlock<Word>;
  using Whole = Pack<Element, kCount>;
  const i64 blocks = walk.rows * walk.blocks_per_row;
  for (i64 at = thread; at < blocks; at += threads) {
    i64 row = 0, within = at;
    if (walk.rows != 1) {
      if ((blocks >> 32) == 0) {
        row = static_cast<i64>(static_cast<u32>(at) / static_cast<u32>(walk.blocks_per_row));
      } else {
        row = at / walk.blocks_per_row;
      }
      within = at - row * walk.blocks_per_row;
    }
    const RowStart start = row_start(walk, row);
    const i64 block = static_cast<i64>(static_cast<u64>(start.global) / kCount) + within;
    const i64 first =
        block * kCount - start.global;    // position in the row of the block's first element; may be negative
    if (first >= walk.size[0]) continue;  // this row touches one block less than others
    const philox::Block numbers = philox::numbers(stream, static_cast<u64>(block));

    Element* const target = out + start.out + first * walk.out_stride[0];
    const Element* const source = kind == Kind::Dropout ? in + start.in + first * walk.in_stride[0] : nullptr;
    const bool whole = first >= 0 && first + kCount <= walk.size[0] && walk.out_stride[0] == 1 &&
                       aligned<Whole>(target) &&
                       (kind != Kind::Dropout || (walk.in_stride[0] == 1 && aligned<Whole>(source)));
    if (whole) {
      Whole result;
      Whole given;
      if constexpr (kind == Kind::Dropout) given = *reinterpret_cast<const Whole*>(source);
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int i = 0; i < kCount; ++i)
        write_element<kind>(word_of<Word>(numbers, i), constants, result.element[i], given.element + i);
      *reinterpret_cast<Whole*>(target) = result;
    } else {
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int i = 0; i < kCount; ++i) {
        if (first + i < 0 || first + i >= walk.size[0]) continue;
        write_element<kind>(word_of<Word>(numbers, i), constants, target[i * walk.out_stride[0]],
                            kind == Kind::Dropout ? source + i * walk.in_stride[0] : nullptr);
      }
    }
  }
}

}  // namespace penstock::random

#ifdef PENSTOCK_RANDOM_KIND
extern "C" __global__ void penstock_random(
    penstock::random::BoxWalk walk, penstock::philox::Stream stream,
    penstock::random::Constants<PENSTOCK_RANDOM_REAL, PENSTOCK_RANDOM_WORD> constants,
    PENSTOCK_RANDOM_ELEMENT* out, const PENSTOCK_RANDOM_ELEMENT* in) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  penstock::random::walk_blocks<penstock::random::Kind::PENSTOCK_RANDOM_KIND>(walk, stream, constants, out,
                                                                              in, thread, threads);
}
#endif
