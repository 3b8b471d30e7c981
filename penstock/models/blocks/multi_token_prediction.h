// Multi-token prediction: in training, a model also predicts the tokens after the next one, each from the
// hidden state and the true tokens in between (teacher forcing).
//
//   h_0 [t]  the hidden state of the model, before its head
//   h_d [t] = block_d(project_d([norm(h_(d-1) [t]), norm(embed(token [t + d]))]))       d = 1 .. depth
//   loss_d   = cross entropy of head(h_d [t]) against token [t + d + 1]
//
//   MultiTokenPrediction more(MultiTokenOptions{.depth = 1, .norm = {.width = 1024}});
//   auto losses = more->forward(hidden, {.tokens = tokens, .targets = targets},
//                               {.embed = embed, .head = head, .block = block});
//
// Embedding and head are the model's and are passed in; so are the blocks, which work on rows of length - d
// tokens at the places 0, 1, ... The loss "multi_token" is the mean over the depths, each of which is the
// mean over its targets, or their sum divided by a fixed number. A target counts if it counts for the model
// (it is not `ignored`) and the tokens t to t + d exist in the row and are of one document. A depth without
// targets counts as 0. Shapes follow from those of the inputs, and nothing waits for the device.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/models/blocks/any_norm.h"
#include "penstock/models/blocks/block_result.h"
#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/multi_token_options.h"

namespace penstock::models {

inline constexpr const char* kMultiTokenLoss = "multi_token";  // prediction of tokens after the next one

// A microbatch of the model.
struct MultiTokenBatch {
  at::Tensor tokens;            // Long or Int [batch, length]: what the model was given
  at::Tensor targets;           // Long [batch, length]: the token after each
  at::Tensor documents = {};    // undefined, or integers [batch, length]
  std::int64_t ignored = -100;  // a target that does not count
  // By which the sum over the targets of a depth is divided; 0: their number. A fixed one makes losses of
  // microbatches and of data-parallel ranks add up to that of the whole batch.
  double divisor = 0;
};

// What belongs to the model.
struct MultiTokenParts {
  std::function<at::Tensor(const at::Tensor& tokens)> embed;  // [batch, n] -> [batch, n, width]
  std::function<at::Tensor(const at::Tensor& hidden)> head;   // [batch, n, width] -> [batch, n, vocabulary]
  // h_d of its input [batch, length - d, width], residual included, and the losses of the block.
  std::function<BlockResult(std::int64_t d, const at::Tensor& rows)> block;
};

// The parameters of one depth.
class MultiTokenStepImpl : public torch::nn::Cloneable<MultiTokenStepImpl> {
 public:
  explicit MultiTokenStepImpl(const NormOptions& options);
  void reset() override;
  void initialize(const std::string& name, const BlockInit& init);
  // Hidden states and embeddings [batch, n, width] -> the input of the block.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& token);

  AnyNorm hidden_norm, token_norm;
  torch::nn::Linear project{nullptr};

 private:
  NormOptions options_;
};
TORCH_MODULE(MultiTokenStep);

class MultiTokenPredictionImpl : public torch::nn::Cloneable<MultiTokenPredictionImpl> {
 public:
  // Throws ConfigError for options that are not valid.
  explicit MultiTokenPredictionImpl(const MultiTokenOptions& options);
  void reset() override;
  // `name`: of this module in the model.
  void initialize(const std::string& name, const BlockInit& init);

  // hidden [batch, length, width]. Returns "multi_token" and then the losses of the blocks, unweighted.
  std::vector<NamedLoss> forward(const at::Tensor& hidden, const MultiTokenBatch& batch,
                                 const MultiTokenParts& parts);

  const MultiTokenOptions& options() const { return options_; }

 private:
  MultiTokenStepImpl& step(std::int64_t d);

  MultiTokenOptions options_;
  torch::nn::ModuleList steps_{nullptr};  // of MultiTokenStep; depth d is entry d - 1
};
TORCH_MODULE(MultiTokenPrediction);

}  // namespace penstock::models
