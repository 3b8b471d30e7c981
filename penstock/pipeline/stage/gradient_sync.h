// Modules that reduce their own gradients over replicas, as a data parallel wrapper does at the end of each backward.
//
//   struct ReplicatedImpl : torch::nn::Module, penstock::GradientSync {
//     bool set_gradient_sync(bool enabled) noexcept override { return std::exchange(enabled_, enabled); }
//     ...                                       // hooks of its parameters reduce .grad() if enabled_
//   };
//
// A step has many backwards and needs one reduction. So a stage with such a module in it, at any depth, switches the reduction off
// for the forwards and backwards of all microbatches but one: that whose weight gradients its schedule computes last. .grad() then
// holds the sum of the earlier ones, and what the module reduces is the gradient of the step. Trial runs never reduce.
//
// What is reduced must be in .grad() when the backward returns: the division by the number of microbatches follows. Where the
// schedule splits backwards, the passes I and W of that one microbatch both have it on; a parameter gets its gradient in one of them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "penstock/stage_module.h"

namespace penstock {

class GradientSync {
 public:
  virtual ~GradientSync() = default;
  // Whether forwards and backwards that run from now on reduce gradients. Returns what it was.
  virtual bool set_gradient_sync(bool enabled) noexcept = 0;
};

using GradientSyncs = std::vector<std::shared_ptr<GradientSync>>;

// All modules of the stage, and modules within them, that are one; each once.
GradientSyncs gradient_syncs_of(const StageModule& module);

// While it lives, none of them reduces. Guards nest.
class NoGradientSync {
 public:
  explicit NoGradientSync(const GradientSyncs& modules);
  ~NoGradientSync();
  NoGradientSync(const NoGradientSync&) = delete;
  NoGradientSync& operator=(const NoGradientSync&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<GradientSync>, bool>> before_;
};

}  // namespace penstock
