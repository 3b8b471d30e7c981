// What the wrappers that rearrange inputs have in common: a call passes other inputs to the inner function,
// and results that are inputs, or views of them, are those of the original inputs again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "penstock/graph/wrap/call_wrapper.h"

namespace penstock::graph {

class InputsWrapper : public AppliedWrapper, public std::enable_shared_from_this<InputsWrapper> {
 public:
  Call around(Call inner, const ViewAndMutationMeta& outer) const final;

  virtual Values inner_inputs(const Values& inputs) const = 0;
  // Derives the metadata of the inner function from that of the outer one by the rules of PyTorch 2.14,
  // without running the function again. The rules know a written base only as well as all its members
  // together; the analysis of the inner function is exact where this is not (which members are written under
  // no_grad, the grad mode afterwards, the number of tangents if several members are written).
  virtual ViewAndMutationMeta derived_meta(ViewAndMutationMeta outer, const Values& inputs) const = 0;
};

// The position of a value among items; their number if it is not there.
template <class Items, class Value>
std::size_t place_of(const Items& items, const Value& value) {
  return static_cast<std::size_t>(std::find(items.begin(), items.end(), value) - items.begin());
}

}  // namespace penstock::graph
