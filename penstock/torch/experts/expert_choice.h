// Which experts each token uses, and in which order their rows are computed.
//
//   // scores [T, experts], of any floating dtype
//   at::Tensor choices = top_choices(scores, 2, "blocks.3.experts");   // [T, 2]
//   ExpertOrder order = expert_order(choices, scores.size(1));         // choices sorted by expert
//
// A choice is one expert of one token; choice t * k + j is the j-th of token t. Sorting is stable: within an
// expert, choices keep the order of the tokens. Shapes do not depend on the routing, and nothing waits for
// the device, so that graphs can capture both operators (penstock::top_choices, penstock::expert_order). They
// have no derivative.
// Thread safety: as for tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace penstock {

// Returns the experts with the `count` highest scores of each token, highest first, the lower index first if
// equal: int64 [T, count]. NaN ranks below all numbers. On the CPU a token whose scores are all NaN throws
// ValueError that names `layer`; a GPU does not wait for such a check: there the token's choices are experts
// 0, 1, ... and its NaN scores, used as weights, make the loss NaN.
at::Tensor top_choices(const at::Tensor& scores, std::int64_t count, const std::string& layer);

// Choices sorted by expert. The rows of expert e are slots ends[e - 1] to ends[e].
struct ExpertOrder {
  at::Tensor order;   // int32 [T * k]: the choice in each slot; -1 in the slots behind the last expert's
  at::Tensor slot;    // int32 [T, k]: the slot of each choice; -1 if it was dropped
  at::Tensor ends;    // int32 [experts]: one past the last slot of each expert
  at::Tensor counts;  // int32 [experts]: how often each expert was chosen, dropped choices included
};

// `choices`: int64 [T, k], each below `experts`. With a capacity above 0, an expert takes its first
// `capacity` choices and drops the others. Throws ValueError for a choice outside of the experts; on a GPU
// such a choice is dropped and not counted.
ExpertOrder expert_order(const at::Tensor& choices, std::int64_t experts, std::int64_t capacity = 0);

}  // namespace penstock
