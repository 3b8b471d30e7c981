// Scopes in which a sharded module's parameters are gathered.
//
//   at::Tensor BlockImpl::forward(const at::Tensor& x) {
//     const ForwardScope scope(*this);                   // gathers this block, casts, frees at the end
//     const at::Tensor h = scope.input(x);
//     return scope.output(h + mlp(norm(h)));
//   }
//
// A module needs no scope: operators gather what they use (fully_shard.h). With one the group is freed exactly where the module ends
// rather than where the next begins, and inputs and outputs of the module as a whole are cast. A module that is not sharded may
// open one, too: nothing happens.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "penstock/shard/state/shard_state.h"
#include "penstock/torch/dispatch/gradient_sink.h"

namespace penstock {

class ForwardScope {
 public:
  // [collective]
  explicit ForwardScope(const torch::nn::Module& module);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  // Cast as the policy's param_dtype and output_dtype say; differentiable. Tensors that are not floating point stay.
  at::Tensor input(const at::Tensor& tensor) const;
  at::Tensor output(const at::Tensor& tensor) const;

 private:
  std::shared_ptr<ShardState> state_;
  std::vector<AccumulatorPtr> accumulators_;  // until the graph holds them
};

// Whole parameters of a module and all sharded modules inside it, to be read and written: every rank must write the same.
class UnshardedScope {
 public:
  // [collective]
  explicit UnshardedScope(const torch::nn::Module& module);
  // Takes what was written into the shards and frees the rest. No communication.
  ~UnshardedScope();
  UnshardedScope(const UnshardedScope&) = delete;
  UnshardedScope& operator=(const UnshardedScope&) = delete;

 private:
  std::shared_ptr<ShardState> state_;
  std::vector<ShardGroup*> groups_;
};

}  // namespace penstock
