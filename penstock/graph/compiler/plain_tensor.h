// Whether a tensor of a run is an ordinary one with a planned geometry, so that what its operators would do
// is known.
// Private to this folder. Thread safety: any thread.
#pragma once

#include "penstock/graph/ir/symbolic_table.h"

namespace penstock::graph {

// A strided tensor on the CPU or a CUDA device, without a subclass, a lazy conjugate or anything else that
// the dispatcher would act on below autograd.
bool is_plain(const at::Tensor& tensor);

// A plain tensor that has exactly this geometry in this call.
bool is_plain_with(const at::Tensor& tensor, const Geometry& geometry, const BoundSizes* sizes);

}  // namespace penstock::graph
