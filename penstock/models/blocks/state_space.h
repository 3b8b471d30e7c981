// A selective state-space block of the Mamba-2 family, without the residual and the norm before it:
//
//   gate, value, key, query, step = projections of x
//   value, key, query = silu(causal convolution)          depth-wise
//   y = selective scan(value, softplus(step + step_bias), -exp(decay_log), key, query, skip)
//   result = output(norm(y * silu(gate)))
//
//   models::StateSpace block({.width = 256}, 0);
//   block->initialize("blocks.0.state_space", {.seed = 1});
//   y = block->forward(norm->forward(x), documents);       // [batch, length, width]
//
// A token depends on itself and on the tokens before it in its document (torch/scan/document_starts.h).
// Projections are computed in the dtype of autocast; steps, decays and states in float32.
//
// Tensor parallel (parallelize_state_space): a rank has some of the heads, and the keys and queries of their
// groups. Squares are summed over the ranks in the norm, and the results of the output projection.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "penstock/models/blocks/initial_values.h"
#include "penstock/models/blocks/norm.h"
#include "penstock/models/blocks/state_space_cache.h"
#include "penstock/models/plan/state_space_options.h"
#include "penstock/world.h"

namespace penstock::models {

class LocalRegion;

// Weights of one depth-wise convolution: [channels, taps] and [channels].
class ChannelTapsImpl : public torch::nn::Cloneable<ChannelTapsImpl> {
 public:
  ChannelTapsImpl(std::int64_t channels, std::int64_t taps);
  void reset() override;

  at::Tensor weight, bias;

 private:
  std::int64_t channels_, taps_;
};
TORCH_MODULE(ChannelTaps);

class StateSpaceImpl : public torch::nn::Cloneable<StateSpaceImpl> {
 public:
  // `block`: its index in the whole model, which identifies its memory in a cache.
  StateSpaceImpl(const StateSpaceOptions& options, std::int64_t block);
  void reset() override;
  // Fills the parameters; `name` is the name of this module in the whole model.
  void initialize(const std::string& name, const BlockInit& init);

  // x [batch, length, width]; documents: integers [batch, length], or undefined. With a cache, x is what
  // follows the tokens that the cache has seen, and the result equals that of the whole row. `counted`: Long
  // [batch], how many of the tokens of each row the cache remembers, the first ones; undefined: all. The
  // results of the others are of no use.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& documents = {}, StateSpaceCache* cache = nullptr,
                     const at::Tensor& counted = {});

  torch::nn::Linear gate{nullptr}, value{nullptr}, key{nullptr}, query{nullptr}, step{nullptr},
      output{nullptr};
  ChannelTaps value_convolution{nullptr}, key_convolution{nullptr}, query_convolution{nullptr};
  RmsNorm norm{nullptr};
  at::Tensor step_bias, decay_log, skip;  // [heads]

  const StateSpaceOptions& options() const { return options_; }

 private:
  struct Weights;
  struct Projected;
  Weights weights(const LocalRegion& region) const;
  Projected project(const at::Tensor& x, const Weights& own) const;
  at::Tensor mix(const Projected& in, const Weights& own, const at::Tensor& documents) const;
  at::Tensor mix_after(const Projected& in, const Weights& own, const at::Tensor& documents,
                       StateSpaceMemory& memory, const at::Tensor& counted) const;
  at::Tensor normalized(const at::Tensor& x, const Weights& own, const LocalRegion& region) const;

  StateSpaceOptions options_;
  std::int64_t block_;
};
TORCH_MODULE(StateSpace);

// [collective] Splits the heads of a block over the ranks of a mesh with one axis. Keys and queries are split
// if there are at least as many groups as ranks, otherwise every rank has all of them. Throws ConfigError if
// heads or groups cannot be divided.
void parallelize_state_space(StateSpaceImpl& block, const comm::MeshGroups& mesh);

}  // namespace penstock::models
