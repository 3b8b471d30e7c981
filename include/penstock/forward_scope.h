// Scopes during which the parameters of a sharded module (fully_shard.h) are gathered.
//
//   struct Block : torch::nn::Module {
//     torch::nn::Linear up = register_module("up", torch::nn::Linear(8, 8));
//     at::Tensor forward(const at::Tensor& x) {
//       const ForwardScope scope(*this);                 // gathers this block, casts, frees at the end
//       const at::Tensor h = scope.input(x);
//       return scope.output(h + up(h));
//     }
//   };
//
// A module does not need a scope: operators gather the parameters they use. With a scope the group is freed
// exactly where the module ends instead of where the next begins, and inputs and outputs of the module as a
// whole are cast. In a module that is not sharded a scope does nothing.
// Thread safety: that of the module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>

namespace penstock {

// Gathers a sharded module for the duration of its forward.
class ForwardScope {
 public:
  // [collective] Waits for the gather of the module's own parameters.
  explicit ForwardScope(const torch::nn::Module& module);
  // Frees, keeps, or keeps a part of the parameters, as ShardOptions::reshard_after_forward says.
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  // Casts an input of the module to MixedPrecision::param_dtype; differentiable. Returns tensors that are not
  // floating point, and all tensors if the option cast_forward_inputs is off, unchanged.
  at::Tensor input(const at::Tensor& tensor) const;
  // Casts an output of the module to MixedPrecision::output_dtype; differentiable. Returns tensors that are
  // not floating point unchanged.
  at::Tensor output(const at::Tensor& tensor) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null if the module is not sharded
};

// Makes the whole parameters of a module and of all sharded modules inside it available for reading and
// writing: every rank must write the same values.
class UnshardedScope {
 public:
  // [collective] Throws StateError if the module was not given to fully_shard.
  explicit UnshardedScope(const torch::nn::Module& module);
  // Copies this rank's part of the written values into the shards and frees the rest. No communication.
  ~UnshardedScope();
  UnshardedScope(const UnshardedScope&) = delete;
  UnshardedScope& operator=(const UnshardedScope&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
