// Reduction operators: how the values of several ranks are combined into one.
//
//   at::Tensor largest = torch::ones({4});
//   world.group().all_reduce(largest, comm::ReduceOp::Max).wait();
//
// Thread safety: all functions may be called from any thread.
#pragma once

#include <string>

namespace penstock::comm {

// How values are combined, element by element.
enum class ReduceOp {
  Sum,  // not for bool tensors: use Max for "any" and Min for "all"
  Avg,  // the sum divided by the number of ranks; floating-point and complex tensors only
  Min,  // not for complex tensors
  Max   // not for complex tensors
};

// Returns "sum", "avg", "min" or "max".
std::string to_string(ReduceOp op);
// The inverse of to_string. Throws ValueError for any other text.
ReduceOp parse_reduce_op(const std::string& text);

}  // namespace penstock::comm
