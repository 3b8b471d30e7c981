// Where a capture goes through the passes (graph/passes).
//
//   run_passes_on_joint(capture, passes, &log);            // before the split: it decides what is saved
//   PartitionedCapture halves = partition(std::move(capture), Partitioner::MinCut, passes, &log);
//
// The joint graph of a capture for all sizes stays as it is recorded, since it is compared with captures at
// other sizes; passes for joint graphs that take symbols run on its halves instead.
// Thread safety: that of a standard container.
#pragma once

#include "penstock/graph/passes/pass_list.h"
#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

// `log` may be null. A graph without a backward has the role Inference.
void run_passes_on_joint(FunctionCapture& capture, const PassList& passes, PassLog* log);
// Called by partition(), before forward writes inputs itself.
void run_passes_on_halves(PartitionedCapture& split, const PassList& passes, PassLog* log);

}  // namespace penstock::graph
