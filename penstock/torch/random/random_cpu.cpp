// The CPU loops. Compiled with -O3 -ffp-contract=off (see CMakeLists.txt): vectorized, without fused
// operations.
//
// A run of elements is processed in pieces that fit the L1 cache: first the words of the piece, then its
// values. The latter is a plain loop that the compiler vectorizes; it is compiled for several instruction
// sets.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/random/philox_words.h"
#include "penstock/torch/random/random_job.h"

// The linker must not merge the builds for different instruction sets: everything below the entry points is
// inlined into them.
#define PENSTOCK_ALWAYS_INLINE inline __attribute__((always_inline))

namespace penstock::random {

namespace {

constexpr i64 kPieceWords = 1024;      // 4 KiB of words
constexpr i64 kGrainElements = 16384;  // minimum per thread

template <class Word>
PENSTOCK_ALWAYS_INLINE Word word_at(const u32* words, i64 element) {
  if constexpr (sizeof(Word) == 4) {
    return words[element];
  } else {
    return (static_cast<u64>(words[2 * element]) << 32) | words[2 * element + 1];
  }
}

// Fills `count` elements whose global indices start at `global`.
template <CpuPath path, Kind kind, class Real, class Word, class Element>
PENSTOCK_ALWAYS_INLINE void fill_run(const philox::Stream& stream, const Constants<Real, Word>& given,
                                     i64 global, i64 count, Element* out, i64 out_stride, const Element* in,
                                     i64 in_stride) {
  constexpr int kCount = kPerBlock<Word>;
  constexpr i64 kPieceElements = kPieceWords / sizeof(Word) * 4 - kCount;
  const Constants<Real, Word> constants =
      given;  // a copy that no store can alias, so that the loop keeps it in registers
  u32 words[kPieceWords + kWordsSlack];
  Element gathered[kind == Kind::Dropout ? kPieceElements : 1];
  Element scattered[kPieceElements];
  while (count > 0) {
    const i64 skip = global % kCount;
    const i64 piece = std::min(count, kPieceElements);
    fill_words(path, stream, static_cast<u64>(global / kCount), (skip + piece + kCount - 1) / kCount, words);
    const u32* const own = words + skip * static_cast<i64>(sizeof(Word) / 4);

    Element* __restrict const target = out_stride == 1 ? out : scattered;
    if constexpr (kind == Kind::Dropout) {
      if (in_stride != 1)
        for (i64 i = 0; i < piece; ++i) gathered[i] = in[i * in_stride];
      const Element* __restrict const source = in_stride == 1 ? in : gathered;
      for (i64 i = 0; i < piece; ++i)
        store(dropout(word_at<Word>(own, i), load(source[i]), constants), target[i]);
      in += piece * in_stride;
    } else {
      for (i64 i = 0; i < piece; ++i) store(draw<kind>(word_at<Word>(own, i), constants), target[i]);
    }
    if (out_stride != 1)
      for (i64 i = 0; i < piece; ++i) out[i * out_stride] = scattered[i];

    out += piece * out_stride;
    global += piece;
    count -= piece;
  }
}

// Fills the elements [begin, end) of the box, in the order of the walk.
template <CpuPath path, Kind kind, class Real, class Word, class Element>
PENSTOCK_ALWAYS_INLINE void fill_range(const RandomJob& job, i64 begin, i64 end) {
  const BoxWalk& walk = job.walk;
  const auto& constants = std::get<Constants<Real, Word>>(job.constants);
  while (begin < end) {
    const i64 row = begin / walk.size[0], column = begin % walk.size[0];
    const RowStart start = row_start(walk, row);
    const i64 count = std::min(end - begin, walk.size[0] - column);
    fill_run<path, kind, Real, Word, Element>(
        job.stream, constants, start.global + column, count,
        static_cast<Element*>(job.out) + start.out + column * walk.out_stride[0], walk.out_stride[0],
        kind == Kind::Dropout ? static_cast<const Element*>(job.in) + start.in + column * walk.in_stride[0]
                              : nullptr,
        walk.in_stride[0]);
    begin += count;
  }
}

template <Kind kind, class Real, class Word, class Element>
void fill_portable(const RandomJob& job, i64 begin, i64 end) {
  fill_range<CpuPath::Portable, kind, Real, Word, Element>(job, begin, end);
}

#ifdef __x86_64__
template <Kind kind, class Real, class Word, class Element>
__attribute__((target("avx2"))) void fill_avx2(const RandomJob& job, i64 begin, i64 end) {
  fill_range<CpuPath::Avx2, kind, Real, Word, Element>(job, begin, end);
}
template <Kind kind, class Real, class Word, class Element>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void fill_avx512(
    const RandomJob& job, i64 begin, i64 end) {
  fill_range<CpuPath::Avx512, kind, Real, Word, Element>(job, begin, end);
}
#endif

using Fill = void (*)(const RandomJob&, i64, i64);

template <Kind kind, class Real, class Word, class Element>
Fill fill_for(CpuPath path) {
#ifdef __x86_64__
  switch (path) {
    case CpuPath::Avx512:
      return fill_avx512<kind, Real, Word, Element>;
    case CpuPath::Avx2:
      return fill_avx2<kind, Real, Word, Element>;
    case CpuPath::Portable:
      break;
  }
#endif
  return fill_portable<kind, Real, Word, Element>;
}

}  // namespace

void run_on_cpu(const RandomJob& job, CpuPath path) {
  if (job.walk.rows == 0) return;
  Fill fill = nullptr;
  with_types(job, [&]<Kind kind, class Real, class Word, class Element>() {
    fill = fill_for<kind, Real, Word, Element>(path);
  });
  PENSTOCK_INVARIANT(fill != nullptr, "no loop computes this kind of random value in this dtype");
  at::parallel_for(0, job.walk.rows * job.walk.size[0], kGrainElements,
                   [&](std::int64_t begin, std::int64_t end) { fill(job, begin, end); });
}

}  // namespace penstock::random
