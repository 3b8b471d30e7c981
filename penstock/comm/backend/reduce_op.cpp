#include "penstock/reduce_op.h"

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::comm {

std::string to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Avg:
      return "avg";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
  }
  return {};
}

ReduceOp parse_reduce_op(const std::string& text) {
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max})
    if (text == to_string(op)) return op;
  throw ValueError(describe("reduction", "\"" + text + "\"", "sum, avg, min or max"));
}

}  // namespace penstock::comm
