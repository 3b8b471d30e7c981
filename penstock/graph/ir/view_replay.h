// How a view was made from its base: the operators in order, with all their non-tensor arguments.
//
//   const auto replay = find_view_replay(graph, value_of_base, value_of_view);
//   const at::Tensor view = replay->apply(base);   // for any tensor with the geometry of the original base
//
// The steps are the function's own operators (transpose, view_as_real, conj, view with a dtype ...), so that
// the resulting view interprets the memory in the same way and autograd differentiates it in the same way,
// whatever the base is. A geometry alone (as_strided) determines neither the dtype of the memory nor which of
// several elements at the same address a gradient belongs to.
// Two replays are equal if their operators and constants are.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct BoundSizes;

// One operator that returns a view of its argument `viewed`; its other arguments are not tensors.
struct ViewStep {
  c10::OperatorHandle op;
  std::vector<Operand> arguments;  // one for each argument of the schema; the viewed one is empty
  std::size_t viewed = 0;
  std::size_t result = 0;              // which result of the operator
  std::optional<std::size_t> element;  // the element of that result, if it is a list (split)

  bool operator==(const ViewStep& other) const;
};

struct ViewReplay {
  std::vector<ViewStep> steps;  // if empty, the view is the base itself

  // `sizes`: for a capture with dynamic dims.
  at::Tensor apply(at::Tensor base, const BoundSizes* sizes = nullptr) const;
  bool operator==(const ViewReplay&) const = default;
};

// Returns the steps from one value of a graph to another, or std::nullopt if `view` was not made from `base`
// by such steps. A write that changes only the shape (transpose_) is a step like its functional counterpart.
std::optional<ViewReplay> find_view_replay(const Graph& graph, ValueId base, ValueId view);

}  // namespace penstock::graph
