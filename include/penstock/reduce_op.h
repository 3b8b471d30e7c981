// Reduction operators: how values of several ranks are combined into one.
#pragma once

#include <string>

namespace penstock::comm {

enum class ReduceOp { Sum, Avg, Min, Max };

// "sum", "avg", "min", "max".
std::string to_string(ReduceOp op);
// Throws ValueError for any other text.
ReduceOp parse_reduce_op(const std::string& text);

}  // namespace penstock::comm
