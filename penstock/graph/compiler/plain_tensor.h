// Whether a tensor of a run is an ordinary one, so that what its operators would do is known.
// Private to this folder. Thread safety: any thread.
#pragma once

#include "penstock/graph/ir/graph.h"

namespace penstock::graph {

// A strided tensor on the CPU or a CUDA device, without a subclass, a lazy conjugate or anything else that
// the dispatcher would act on below autograd.
bool is_plain(const at::Tensor& tensor);

// Nobody else sees the memory: neither a view, nor a caller, nor who lent it to LibTorch (from_blob).
bool is_owned_alone(const at::Tensor& tensor);

bool is_laid_out_as(const at::Tensor& tensor, const StridedLayout& layout);

}  // namespace penstock::graph
