// A layer of experts: a router sends each token to the few experts with the highest scores. Without residual
// and norm, which belong to the block around it.
//
//   models::Experts experts(models::ExpertOptions{.width = 64, .experts = 8, .top_k = 2, .expert_width = 32},
//                           "blocks.1.experts");
//   models::BlockResult result = experts->forward(x);             // x [batch, length, 64]
//
//   logits = router(x)                     float32 (float64 for float64), of x as the experts see it
//   scores = softmax or sigmoid of logits
//   chosen = the top_k of scores, plus router_bias if there is one
//   y      = sum over the chosen of weight * down(silu(gate(x)) * up(x)), plus shared(x) if there is one
//
// Weights are applied before the product with down, which is the same sum (expert_gate.h). A weight is the
// expert's score, divided by the sum over the token's chosen experts if router_normalize.
// Every expert takes the tokens that chose it, none or all (dropless); with a capacity factor at most
// expert_capacity(), the first ones in token order, and dropped choices contribute nothing. Results do not
// depend on the number of threads, all shapes are independent of the routing, and nothing waits for the
// device: graphs can capture it.
//
// Losses: "balance", experts * sum over experts of (share of the choices) * (mean score), where shares have
// no gradient: 1 for softmax if all are equal; and "router_z", the mean of logsumexp(logits)^2. With
// set_balance_ranks() the shares are those of several ranks.
//
// Balancing by a bias (router_bias_rate > 0): router_bias is added to the scores for the choice only. In
// training mode each forward adds the number of tokens of each expert to router_load; update_router_bias()
// then changes the bias of each expert by the rate, up if it had fewer tokens than the mean, and clears the
// load. Call it once per optimizer step, after router_load has been summed over the data parallel ranks.
// Trial runs and recomputed forwards do not count. Both buffers stay outside of autograd.
//
// A token whose scores are all NaN: on the CPU ValueError that names the layer; on a GPU NaN flows into the
// hidden states and the losses, without waiting for the device, and the trainer's search for the first
// operator with values that are not finite names the block.
//
// Expert parallelism: see expert_parallel.h.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "penstock/group.h"
#include "penstock/models/blocks/block_result.h"
#include "penstock/models/blocks/feed_forward.h"
#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/plan/expert_options.h"
#include "penstock/world.h"

namespace penstock::models {

// The ranks among which a layer is divided, each a mesh with one axis (expert_parallel.h).
struct ExpertAxes {
  std::optional<comm::MeshGroups> experts;  // each rank has some experts, and its own tokens
  // Each rank has some columns of every expert, and the same tokens; they may be divided over these ranks
  // outside of the layer (split_rows.h).
  std::optional<comm::MeshGroups> columns;
};

class ExpertsImpl : public torch::nn::Cloneable<ExpertsImpl> {
 public:
  // `layer`: its name in the whole model, for errors. Throws ConfigError for invalid options.
  explicit ExpertsImpl(const ExpertOptions& options, std::string layer = "experts");
  void reset() override;
  // x: [batch, length, width]. The hidden states have the dtype of the experts' products. `valid`: undefined,
  // or Bool [batch, length], false for padding: it takes no part in the losses and the load, and it gets
  // places of a limited expert only after all other tokens.
  BlockResult forward(const at::Tensor& x, const at::Tensor& valid = {});

  // `name` is the prefix of the parameters' names in the whole model.
  void initialize(const std::string& name, const BlockInit& init);
  // See above. Does nothing without a bias.
  void update_router_bias();

  // The loss "balance" uses the shares of the choices of all these ranks, which have other tokens of the same
  // microbatch, in training mode: its mean over them is then that of one rank with all of the tokens, if
  // all ranks have equally many that are not padding.
  void set_balance_ranks(const comm::Group& ranks) { balance_ranks_ = ranks; }
  // Set by parallelize_experts().
  void set_axes(ExpertAxes axes) { axes_ = std::move(axes); }

  const ExpertOptions& options() const { return options_; }
  const std::string& layer() const { return layer_; }

  at::Tensor gate, up;  // [experts, width, expert_width]
  at::Tensor down;      // [experts, expert_width, width]
  torch::nn::Linear router{nullptr};
  FeedForward shared{nullptr};          // empty without a shared expert
  at::Tensor router_bias, router_load;  // float32 [experts]; undefined without a bias

 private:
  struct Gating;
  struct Routing;
  // Logits [T, experts] of all tokens of x, on every rank.
  at::Tensor router_logits_of(const at::Tensor& x) const;
  // `valid`: undefined, or Bool [T].
  Routing route(const at::Tensor& logits, const at::Tensor& valid);
  // [experts], how often each was chosen, divided by the number of choices of a rank; 0: by their sum.
  at::Tensor shares_of(const at::Tensor& counts, std::int64_t choices, at::ScalarType dtype) const;
  at::Tensor run_experts(const at::Tensor& tokens, const Routing& routing) const;
  // The experts' own layers: rows [R, width] sorted by expert -> [R, width].
  at::Tensor feed(const at::Tensor& rows, const at::Tensor& ends, const Gating& gating) const;

  ExpertOptions options_;
  std::string layer_;
  ExpertAxes axes_;
  std::optional<comm::Group> balance_ranks_;
};
TORCH_MODULE(Experts);

}  // namespace penstock::models
