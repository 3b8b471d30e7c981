// How a tensor was made from one that it is a view of: the operators in order, with all that they take besides the tensor.
//
//   const auto replay = find_view_replay(graph, value_of_base, value_of_view);
//   const at::Tensor view = replay->apply(base);       // of any tensor with the geometry that the base had
//
// The steps are those of the function (transpose, view_as_real, conj, view with a dtype ...), so that the view that they make looks at the memory in the
// same way, and autograd differentiates it in the same way, whatever the base is: a geometry alone (as_strided) says neither of which dtype the memory
// is nor which of several elements at one place of the memory a gradient belongs to.
// Two replays are equal when their operators and constants are.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

struct BoundSizes;

// One operator that returns a view of its argument `viewed`; no other argument of it is a tensor.
struct ViewStep {
  c10::OperatorHandle op;
  std::vector<Operand> arguments;           // as many as the schema has; the place of the viewed one is empty
  std::size_t viewed = 0;
  std::size_t result = 0;                   // which result of the operator
  std::optional<std::size_t> element;       // and which of its elements, where it is a list (split)

  bool operator==(const ViewStep& other) const;
};

struct ViewReplay {
  std::vector<ViewStep> steps;              // none: the base itself

  // `sizes`: of a capture with dynamic dims.
  at::Tensor apply(at::Tensor base, const BoundSizes* sizes = nullptr) const;
  bool operator==(const ViewReplay&) const = default;
};

// The steps from one value of a graph to another. Returns std::nullopt if `view` was not made from `base` by such steps. A write that changes the shape
// alone (transpose_) is a step like its functional sibling.
std::optional<ViewReplay> find_view_replay(const Graph& graph, ValueId base, ValueId view);

}  // namespace penstock::graph
