// An autograd node that holds what a captured forward saved for its backward.
//
// Unless the graph is retained, saved tensors are released when backward begins, so that each is freed at its
// last use, as if every operator were its own node. A backward that is rejected before that leaves the graph
// unchanged and can be retried, retaining the graph or not. Backward runs under the StepContext of its
// forward (StepOfForward), so that it draws the same random numbers. Private to this folder. Thread safety:
// that of autograd nodes; saving is complete before others see the node.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/graph/run/run_again.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/autograd_node.h"

namespace penstock::graph {

// Copies to new memory, keeping the lazy conjugate and negative bits: the operators after it were captured
// for those.
at::Tensor copy_keeping_lazy_bits(const at::Tensor& tensor);

class SavingNode : public torch::autograd::Node {
 public:
  SavingNode();

  std::string name() const override { return "CapturedFunction"; }
  void will_release_variables() override { releasing_ = true; }
  void release_variables() override;

 protected:
  // Makes the StepContext of forward current, if forward ran in a step.
  class StepOfForward {
   public:
    explicit StepOfForward(const SavingNode& node) {
      if (node.step_->running) guard_.emplace(node.step_);
    }

   private:
    std::optional<StepGuard> guard_;
  };

  // Called after the results have their history: a saved result must not hold its own node.
  void save(const at::Tensor& tensor) { saved_.push_back(as_saved(tensor)); }
  // Only checked in backward: throws if the tensor was written since.
  void watch(const at::Tensor& tensor) { watched_.push_back(as_saved(tensor)); }

  // What gradients_again() needs, unless second derivatives are refused (`again` is null). `kept`: inputs
  // that stay alive until backward has run; for each primal.
  void hold_inputs(std::shared_ptr<const RunAgain> again, const std::vector<at::Tensor>& primals,
                   const std::vector<char>& kept);
  // The gradients of a backward that is differentiated. Throws NotImplemented where that is refused.
  torch::autograd::variable_list gradients_again(const torch::autograd::variable_list& tangents);

  // Returns the saved tensors, in order. Throws for whatever the backward of a captured function rejects:
  // StateError for deterministic algorithms enabled after forward, c10::Error if it already ran or a saved
  // tensor was written since.
  std::vector<at::Tensor> unpack();
  // Returns whether the graph is not retained by the backward that calls. Must be called at its beginning:
  // if it is rejected, the next one may retain the graph.
  bool take_releasing() { return std::exchange(releasing_, false); }
  // Releases the saved tensors unless the graph is retained, once nothing can be rejected any more.
  void give_up(bool releasing);

 private:
  torch::autograd::SavedVariable as_saved(const at::Tensor& tensor) const {
    return {tensor, tensor.grad_fn().get() == this};
  }

  void check() const;

  std::vector<torch::autograd::SavedVariable> saved_, watched_;
  std::shared_ptr<const RunAgain> again_;
  HeldInputs held_inputs_;
  bool deterministic_;                       // at forward
  std::shared_ptr<const StepContext> step_;  // at forward
  bool releasing_ = false, released_ = false;
};

}  // namespace penstock::graph
