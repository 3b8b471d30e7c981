#include "penstock/torch/experts/expert_rows_cpu.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace penstock::detail {
namespace {

// Columns summed at a time: the sums stay in the first-level cache.
constexpr std::int64_t kColumns = 512;
// Independent partial sums of a dot product, so that it is vectorized; their number fixes the order of the
// additions.
constexpr std::int64_t kPartials = 16;

}  // namespace

template <class Element>
void combine_row(const Element* rows, const std::int32_t* slots, const RowSum<Element>* weights,
                 std::int64_t choices, std::int64_t width, Element* sum) {
  using Sum = RowSum<Element>;
  Sum part[kColumns];
  for (std::int64_t first = 0; first < width; first += kColumns) {
    const std::int64_t columns = std::min(kColumns, width - first);
    std::fill(part, part + columns, Sum(0));
    for (std::int64_t choice = 0; choice < choices; ++choice) {
      if (slots[choice] < 0) continue;
      const Element* row = rows + slots[choice] * width + first;
      if (weights == nullptr) {
        for (std::int64_t i = 0; i < columns; ++i) part[i] += static_cast<Sum>(row[i]);
      } else {
        const Sum weight = weights[choice];
        for (std::int64_t i = 0; i < columns; ++i) part[i] += weight * static_cast<Sum>(row[i]);
      }
    }
    for (std::int64_t i = 0; i < columns; ++i) sum[first + i] = static_cast<Element>(part[i]);
  }
}

template <class Element>
RowSum<Element> scale_and_multiply(const Element* __restrict row, const Element* __restrict gradient,
                                   RowSum<Element> weight, std::int64_t width, Element* __restrict scaled) {
  using Sum = RowSum<Element>;
  Sum partial[kPartials] = {};
  std::int64_t i = 0;
  for (; i + kPartials <= width; i += kPartials)
    for (std::int64_t j = 0; j < kPartials; ++j) {
      const Sum g = static_cast<Sum>(gradient[i + j]);
      partial[j] += static_cast<Sum>(row[i + j]) * g;
      scaled[i + j] = static_cast<Element>(weight * g);
    }
  for (std::int64_t j = 0; i < width; ++i, ++j) {
    const Sum g = static_cast<Sum>(gradient[i]);
    partial[j] += static_cast<Sum>(row[i]) * g;
    scaled[i] = static_cast<Element>(weight * g);
  }
  Sum sum = 0;
  for (const Sum one : partial) sum += one;
  return sum;
}

template <class Element>
void gate_row(const Element* __restrict gate, const Element* __restrict up,
              const RowSum<Element>* __restrict shares, RowSum<Element> weight, std::int64_t width,
              Element* __restrict inner) {
  using Sum = RowSum<Element>;
  for (std::int64_t i = 0; i < width; ++i)
    inner[i] =
        static_cast<Element>(weight * (static_cast<Sum>(gate[i]) * shares[i] * static_cast<Sum>(up[i])));
}

template <class Element>
RowSum<Element> gate_row_backward(const Element* __restrict gate, const Element* __restrict up,
                                  const RowSum<Element>* __restrict shares,
                                  const Element* __restrict gradient, RowSum<Element> weight,
                                  std::int64_t width, Element* __restrict by_gate,
                                  Element* __restrict by_up) {
  using Sum = RowSum<Element>;
  Sum partial[kPartials] = {};
  const auto term = [&](std::int64_t i) {
    const Sum x = static_cast<Sum>(gate[i]), share = shares[i], g = static_cast<Sum>(gradient[i]),
              silu = x * share, other = static_cast<Sum>(up[i]), scaled = weight * g;
    by_up[i] = static_cast<Element>(scaled * silu);
    by_gate[i] = static_cast<Element>(scaled * other * (share * (1 + x * (1 - share))));
    return g * (silu * other);
  };
  std::int64_t i = 0;
  for (; i + kPartials <= width; i += kPartials)
    for (std::int64_t j = 0; j < kPartials; ++j) partial[j] += term(i + j);
  for (std::int64_t j = 0; i < width; ++i, ++j) partial[j] += term(i);
  Sum sum = 0;
  for (const Sum one : partial) sum += one;
  return sum;
}

#define PENSTOCK_ROW_LOOPS(Element)                                                                        \
  template void combine_row<Element>(const Element*, const std::int32_t*, const RowSum<Element>*,          \
                                     std::int64_t, std::int64_t, Element*);                                \
  template RowSum<Element> scale_and_multiply<Element>(const Element*, const Element*, RowSum<Element>,    \
                                                       std::int64_t, Element*);                            \
  template void gate_row<Element>(const Element*, const Element*, const RowSum<Element>*, RowSum<Element>, \
                                  std::int64_t, Element*);                                                 \
  template RowSum<Element> gate_row_backward<Element>(const Element*, const Element*,                      \
                                                      const RowSum<Element>*, const Element*,              \
                                                      RowSum<Element>, std::int64_t, Element*, Element*);
PENSTOCK_ROW_LOOPS(float)
PENSTOCK_ROW_LOOPS(double)
PENSTOCK_ROW_LOOPS(c10::BFloat16)
PENSTOCK_ROW_LOOPS(c10::Half)
#undef PENSTOCK_ROW_LOOPS

}  // namespace penstock::detail
