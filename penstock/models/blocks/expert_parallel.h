// Experts divided among ranks: each rank holds some of the experts and its own tokens, and rows travel to the
// ranks of their experts and back.
//
//   comm::MeshGroups ep = world.mesh("cpu", {{"ep", world.size()}});
//   models::parallelize_experts(*experts, ep);             // experts 0 to E / n - 1 are on rank 0, ...
//   models::BlockResult result = experts->forward(x);      // x: the tokens of this rank
//
// gate, up and down become distributed tensors, split along dim 0; router and shared expert stay as they are,
// equal on all ranks. A mesh with an axis "tp" also splits the columns of each expert, over ranks that have
// the same tokens: one sum over it forward and one backward. Per forward, the number of rows for each expert
// is exchanged once, and this is the only place that waits for the device: the sizes of the exchange must be
// known, therefore a graph cannot capture it. Then rows are exchanged twice forward and twice backward. In a
// schedule's unit that pairs a forward with a backward, the other half computes during each exchange
// (torch/random/unit_half.h).
//
// Within an expert, rows are in the order of the ranks, then of the tokens: as on one rank with the batches
// of all ranks one after another. Hidden states and gradients equal those of one rank up to rounding: the
// weights of the choices stay with the tokens, and are applied to what comes back, whereas one rank applies
// them before its last product. Losses are those of the rank's own tokens, and the capacity counts the
// choices of one rank.
//
// Gradients: those of gate, up and down contain the terms of the tokens of all ranks of the mesh. Do not
// reduce them over it. Reduce them over the other data parallel ranks only; where gradients are averaged,
// divide them by the number of all data parallel ranks, as the others. Gradients of the router and of the
// shared expert contain the terms of the rank's own tokens and are reduced over all data parallel ranks as
// usual.
// Thread safety: as for collectives: all ranks run forward and backward of their layers in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "penstock/models/blocks/experts.h"
#include "penstock/torch/experts/expert_choice.h"
#include "penstock/world.h"

namespace penstock::models {

// [collective] Divides the experts among the ranks along the axis "ep" of a mesh, and the columns of each
// expert among those along "tp". Values are those of the first rank. Throws ConfigError if they cannot be
// divided evenly, ValueError for a mesh with other axes.
void parallelize_experts(ExpertsImpl& experts, const comm::MeshGroups& mesh);

// What a rank computes for its own experts: rows [R, width] sorted by expert and their ends -> [R, width].
using ExpertComputation = std::function<at::Tensor(const at::Tensor& rows, const at::Tensor& ends)>;

// [collective, waits] Sends rows [S, width], sorted by the experts of all ranks (`order`), to the ranks of
// their experts and returns the results in the same places. Rows behind the last expert's give zero.
at::Tensor compute_elsewhere(const at::Tensor& rows, const ExpertOrder& order, const comm::Group& group,
                             const ExpertComputation& compute);

}  // namespace penstock::models
