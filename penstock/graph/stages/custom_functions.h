// Finds the user-defined autograd functions that a traced forward called, and records their backwards.
//
//   functions = record_custom_functions(tracer, history);   // after the forward
//
// Private to this folder. Thread safety: one thread.
#pragma once

#include <vector>

#include "penstock/graph/stages/forward_trace.h"
#include "penstock/graph/stages/history_of_values.h"
#include "penstock/graph/trace/tracer.h"

namespace penstock::graph {

// Appends the backwards to the tracer's graph as inputs and nodes of Phase::Backward, and takes them out
// again: afterwards the graph has its inputs and nodes of before, and the values of the backwards too. Call
// it under the tracer and its fake mode. Throws NotImplemented for a function that writes its arguments, or
// takes a tensor whose value is not known.
std::vector<CustomFunction> record_custom_functions(Tracer& tracer, const HistoryOfValues& history);

}  // namespace penstock::graph
