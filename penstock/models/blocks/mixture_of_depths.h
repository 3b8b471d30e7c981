// Mixture of depths: a wrapper around any block that lets only some tokens of a row through it.
//
//   x --+-- router --> logit --> choose --+
//       |                                 v
//       +------------------------------ gather --> block(rows, chosen) --> * sigmoid(logit) (* gamma)
//       |                                                                         |
//       +------------------------------ + <----------- scatter -------------------+
//
//   MixtureOfDepths depth(DepthOptions{.width = 1024, .capacity = 0.25});
//   BlockResult out = depth->forward(x, [&](const at::Tensor& rows, const ChosenTokens& chosen) {
//     return BlockResult{feed->forward(norm->forward(rows))};
//   });
//
// The block gets the chosen rows [batch, k, width] and returns what it *adds* to them, without the residual.
// What belongs to tokens (positions, documents, parents) it takes through `chosen` (chosen_tokens.h). Tokens
// that are not chosen leave unchanged. The weight sigmoid(logit), by which the addition is multiplied, gives
// the router its gradient. DepthKind::Gamma multiplies by a learnt scale gamma [width] as well, which is
// small at first, so that a wrapped block disturbs the residual stream little until it has learnt something;
// it is not zero, because then neither block nor router would get a gradient.
//
// Training and generation choose differently. DepthChoice::Capacity takes the k =
// DepthOptions::chosen(length) tokens of each row with the highest logits: shapes are fixed, but the choice
// depends on later tokens. DepthChoice::Threshold takes the tokens whose logit is positive, which depends on
// no other token: use it for generation, and to score what generation would do. The loss "depth_router", the
// binary cross entropy of logits against having been chosen, makes the second choice resemble the first; they
// agree exactly only if the router separates the chosen ones of each row by sign.
//
// DepthChoice::Threshold runs the block on all tokens, since a number of tokens that depends on values would
// have to be read from the device, and uses the results of the active ones (ChosenTokens::active). Within a
// row the active ones come first, hence a causal block needs no care. A block with a cache must leave it
// unchanged for tokens that are not active: a state with kept_state(), keys by hiding them. No losses are
// returned, because those of the block would count tokens that were not chosen.
//
// Logits, weights and the loss are computed in float32 (float64 for float64), also under autocast; the result
// has the dtype of x. Fixed shapes, nothing waits for the device. Activations must be plain tensors.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>

#include "penstock/models/blocks/block_result.h"
#include "penstock/models/blocks/chosen_tokens.h"
#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/depth_options.h"

namespace penstock::models {

// Returns what a block adds to rows [batch, k, width], and its losses.
using RoutedBlock = std::function<BlockResult(const at::Tensor& rows, const ChosenTokens& chosen)>;

// How tokens are chosen.
enum class DepthChoice { Capacity, Threshold };

class MixtureOfDepthsImpl : public torch::nn::Cloneable<MixtureOfDepthsImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit MixtureOfDepthsImpl(const DepthOptions& options);
  void reset() override;
  // `name`: of this module in the model.
  void initialize(const std::string& name, const BlockInit& init);

  // x [batch, length, width]. Returns hidden states of the shape of x; in DepthChoice::Capacity the losses of
  // the block by their names, then "depth_router". Throws ValueError for another shape, and for a block whose
  // result is not shaped like its rows.
  // `valid`: undefined, or Bool [batch, length]; tokens that are not valid, padding, are chosen last and do
  // not count in the loss.
  BlockResult forward(const at::Tensor& x, const RoutedBlock& block,
                      DepthChoice choice = DepthChoice::Capacity, const at::Tensor& valid = {});

  const DepthOptions& options() const { return options_; }

  torch::nn::Linear router{nullptr};  // with a bias, so that 0 can separate any fraction of the tokens
  at::Tensor gamma;                   // [width]; undefined for DepthKind::Plain

 private:
  // [batch, length]
  at::Tensor logits_of(const at::Tensor& x);

  DepthOptions options_;
};
TORCH_MODULE(MixtureOfDepths);

// For a block that returns its rows with the addition: subtracts the rows. In 16 bits this loses the digits
// that the sum had rounded off; prefer a block that returns the addition itself.
BlockResult without_residual(BlockResult result, const at::Tensor& rows);

// The state of a block [batch, ...] after a token [batch, 1] that may not be active.
at::Tensor kept_state(const at::Tensor& before, const at::Tensor& after, const ChosenTokens& chosen);

}  // namespace penstock::models
