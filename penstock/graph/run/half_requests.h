// What compilers and passes are told about the halves of a capture.
// Thread safety: any thread.
#pragma once

#include <cstddef>

#include "penstock/graph/partition/backward_split.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

// The number of inputs of the joint graph that are parameters and buffers; they are the first.
std::size_t static_primals(const FunctionCapture& capture);

CompileRequest forward_request(const PartitionedCapture& capture, GraphRole role);
CompileRequest backward_request(const PartitionedCapture& capture);

// Of the backward half of a capture: which gradients are those of parameters.
BackwardRoles backward_roles(const FunctionCapture& capture, const Partition& halves);
// Of a part of it.
CompileRequest request_of(const BackwardPart& part);

}  // namespace penstock::graph
