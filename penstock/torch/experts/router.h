// What a router of experts computes: logits, scores, the experts of each token and their weights, and the
// sums of its losses.
//
//   at::Tensor logits = router_logits(tokens, weight);                // float32 [T, experts]
//   Routed routed = route_tokens(logits, {.choices = 2, .layer = "blocks.3.experts"});
//
//   scores  = softmax or sigmoid of logits
//   chosen  = the highest of scores + bias, as top_choices() (expert_choice.h) takes them
//   weights = scores of the chosen, divided by their sum if `normalize`
//
// Each is a registered operator with its own derivative (penstock::router_logits, penstock::route_tokens),
// one pass over the tokens on a GPU, where LibTorch's operators would be twenty. Sums are computed in a fixed
// order. Shapes do not depend on the routing, and nothing waits for the device. A backward that is recorded
// (create_graph) runs by LibTorch's operators, so that it can be differentiated again. Thread safety: as for
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace penstock {

// tokens [T, width], weight [experts, width]. Logits are float32 (float64 for float64), whatever the dtype of
// the tokens: rounding them to 16 bits would change which experts are chosen. For 16-bit tokens on a GPU the
// product runs on tensor cores, adds up in float32, and takes the weight as two 16-bit terms, 16 bits of its
// 24 (LibTorch 2.8 and newer; otherwise in float32); gradients are products of 16-bit matrices, as those of
// other layers under autocast.
at::Tensor router_logits(const at::Tensor& tokens, const at::Tensor& weight);

struct RouterRule {
  std::int64_t choices = 1;  // experts per token
  bool sigmoid = false;      // scores: sigmoid of each logit instead of softmax over the experts
  bool normalize = true;     // weights of a token sum to 1
  std::string layer = "";    // for errors
};

struct Routed {
  at::Tensor choices;      // int64 [T, choices], highest first
  at::Tensor weights;      // [T, choices], differentiable, in the dtype of the logits
  at::Tensor mean_scores;  // [experts], differentiable: the mean over the tokens
  at::Tensor mean_square;  // scalar, differentiable: the mean of logsumexp(logits)^2
};

// logits: float32 or float64 [T, experts], T > 0. `bias` [experts], or undefined, is added to the scores for
// the choice only. Throws ValueError like top_choices().
Routed route_tokens(const at::Tensor& logits, const RouterRule& rule, const at::Tensor& bias = {});

}  // namespace penstock
