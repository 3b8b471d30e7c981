// Results that are views: made from their base after the graph has run, so that autograd sees the view that
// the function made.
#pragma once

#include "penstock/graph/ir/metadata.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

// The view of `base` that `info` describes, with the gradient that it had in the function.
at::Tensor result_view(at::Tensor base, const OutputInfo& info, const BoundSizes* sizes);

// Replaces the results that are inputs, or views of inputs, by those of `inputs`, as `meta` describes them.
void restore_input_aliases(Values& outputs, const Values& inputs, const ViewAndMutationMeta& meta,
                           const BoundSizes* sizes);

}  // namespace penstock::graph
