// The loops of expert_rows.cpp and expert_gate.cpp over contiguous rows of `width` elements, for float,
// double and c10::BFloat16 (and c10::Half). Private to this folder. Sums are computed in Sum: double for
// double, else float.
#pragma once

#include <cstdint>
#include <type_traits>

namespace penstock::detail {

template <class Element>
using RowSum = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// sum[i] = the sum over j of weights[j] * rows[slots[j]][i], in order; negative slots are skipped. Without
// weights (null) all are 1.
template <class Element>
void combine_row(const Element* rows, const std::int32_t* slots, const RowSum<Element>* weights,
                 std::int64_t choices, std::int64_t width, Element* sum);

// scaled[i] = weight * gradient[i]; returns the sum of row[i] * gradient[i].
template <class Element>
RowSum<Element> scale_and_multiply(const Element* row, const Element* gradient, RowSum<Element> weight,
                                   std::int64_t width, Element* scaled);

// inner[i] = weight * gate[i] * shares[i] * up[i], where shares are the sigmoids of gate.
template <class Element>
void gate_row(const Element* gate, const Element* up, const RowSum<Element>* shares, RowSum<Element> weight,
              std::int64_t width, Element* inner);

// The gradients of gate and up, for that of inner. Returns that of the weight.
template <class Element>
RowSum<Element> gate_row_backward(const Element* gate, const Element* up, const RowSum<Element>* shares,
                                  const Element* gradient, RowSum<Element> weight, std::int64_t width,
                                  Element* by_gate, Element* by_up);

}  // namespace penstock::detail
