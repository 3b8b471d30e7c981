// What a block of a model returns: hidden states, and the auxiliary losses that arose in it, by name.
//
//   BlockResult result = experts->forward(x);
//   for (const NamedLoss& loss : result.losses) ...
//
// A loss is unweighted, a scalar and part of the autograd graph: the mean over the tokens of this forward.
// Whoever runs the blocks weights it, adds it to the backward and reports it by its name.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace penstock::models {

// Names of the auxiliary losses of Penstock's own blocks.
inline constexpr const char* kBalanceLoss = "balance";           // experts get equal numbers of tokens
inline constexpr const char* kRouterZLoss = "router_z";          // router logits stay small
inline constexpr const char* kDepthRouterLoss = "depth_router";  // routing of tokens around a block

// One auxiliary loss.
struct NamedLoss {
  std::string name;
  at::Tensor value;
};

// Hidden states [batch, length, width] and the losses, in the order in which they arose.
struct BlockResult {
  at::Tensor hidden;
  std::vector<NamedLoss> losses = {};
};

}  // namespace penstock::models
