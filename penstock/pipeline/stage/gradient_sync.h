// Interface of modules that reduce their own gradients over replicas, as a data-parallel wrapper does at the
// end of each backward.
//
//   struct ReplicatedImpl : torch::nn::Module, penstock::GradientSync {
//     bool set_gradient_sync(bool enabled) noexcept override { return std::exchange(enabled_, enabled); }
//     ...                                       // hooks of its parameters reduce .grad() if enabled_
//   };
//
// A step has many backwards and needs one reduction. A stage that contains such a module, at any depth,
// therefore disables the reduction for the forwards and backwards of all microbatches except the one whose
// weight gradients its schedule computes last. At that point .grad() holds the sum of the earlier ones, and
// the module reduces the gradient of the whole step. Trial runs never reduce.
//
// The reduced gradient must be in .grad() when the backward returns, because the division by the number of
// microbatches follows. If the schedule splits backwards, the reduction is enabled in both passes, I and W,
// of that microbatch; each parameter gets its gradient in one of them. The pipeline refuses a schedule in
// which another microbatch has the last I: the gradients of I would be reduced before they are complete.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "penstock/stage_module.h"

namespace penstock {

class GradientSync {
 public:
  virtual ~GradientSync() = default;
  // Sets whether subsequent forwards and backwards reduce gradients. Returns the previous value.
  virtual bool set_gradient_sync(bool enabled) noexcept = 0;
};

using GradientSyncs = std::vector<std::shared_ptr<GradientSync>>;

// Returns all modules of the stage that implement GradientSync, at any depth, each once.
GradientSyncs gradient_syncs_of(const StageModule& module);

// Disables the reduction of all these modules during its lifetime. Guards nest.
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
