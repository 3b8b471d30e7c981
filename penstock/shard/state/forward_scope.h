// Scopes during which a sharded module's parameters are gathered.
//
//   at::Tensor BlockImpl::forward(const at::Tensor& x) {
//     const ForwardScope scope(*this);                   // gathers this block, casts, frees at the end
//     const at::Tensor h = scope.input(x);
//     return scope.output(h + mlp(norm(h)));
//   }
//
// A module does not need a scope: operators gather the parameters they use (fully_shard.h). With a scope the
// group is freed exactly where the module ends instead of where the next begins, and inputs and outputs of
// the module as a whole are cast. In a module that is not sharded a scope does nothing.
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

  // Casts according to the policy's param_dtype and output_dtype; differentiable. Tensors that are not
  // floating point are returned unchanged.
  at::Tensor input(const at::Tensor& tensor) const;
  at::Tensor output(const at::Tensor& tensor) const;

 private:
  std::shared_ptr<ShardState> state_;
  std::vector<AccumulatorPtr> accumulators_;  // until the autograd graph holds them
};

// Makes the whole parameters of a module and of all sharded modules inside it available for reading and
// writing: every rank must write the same values.
class UnshardedScope {
 public:
  // [collective]
  explicit UnshardedScope(const torch::nn::Module& module);
  // Copies this rank's part of the written values into the shards and frees the rest. No communication.
  ~UnshardedScope();
  UnshardedScope(const UnshardedScope&) = delete;
  UnshardedScope& operator=(const UnshardedScope&) = delete;

 private:
  std::shared_ptr<ShardState> state_;
  std::vector<ShardGroup*> groups_;
};

}  // namespace penstock
