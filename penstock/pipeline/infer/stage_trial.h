// A trial run of one stage: determines its outputs and gradients without changing any state.
//
//   StageTrial trial(stage, {.has_backward = true, .ends = false});
//   trial.forward(input_metas, kwargs);               // or the real arguments, at the first stage
//   send(trial.outputs());
//   ...
//   trial.backward(output_gradient_metas);            // or backward_of_loss, at the last stage
//   send(trial.input_grads());
//
// The trial runs on fake tensors if possible, also for sharded and tensor-parallel stages; otherwise on zeros
// and on copies of the arguments, and restores everything it has written, and the random state, when it ends.
// It never touches gradients of parameters and does not communicate. A tensor that the module makes in the
// run and keeps has the values of a real run after the trial, if these depend on nothing fake or zero;
// otherwise a real operator on it throws a StateError that explains this.
// Used for one microbatch signature, on one thread. Trials of several stages end in reverse order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/stage.h"
#include "penstock/stage_module.h"

namespace penstock {

class StageTrial {
 public:
  struct Kind {
    bool has_backward = false;
    bool ends = false;  // the last stage of its chain, whose result is not sent
  };
  StageTrial(PipelineStage stage, Kind kind);
  ~StageTrial();

  // Throws StageForwardError if the module fails, PipeliningMetadataError for outputs that cannot be sent
  // (except at the last stage).
  void forward(const Tree& args, const Tree& kwargs);
  void forward(const TensorMetas& inputs, const Tree& kwargs);

  // Empty for a last stage that returns something other than tensors.
  const TensorMetas& outputs() const { return outputs_; }
  // Returns whether the result of some operator depends on values: shapes may then change between
  // microbatches.
  bool data_dependent() const { return data_dependent_; }

  // Takes the metas of the gradients of the outputs, one per output. Throws PipeliningMetadataError if their
  // number differs, and for the gradient of an output that needs none.
  void backward(const OptionalTensorMetas& output_grads);
  // If this fails on fake tensors, it is retried on real ones where gradients cannot be derived otherwise,
  // that is for distributed inputs.
  void backward_of_loss(const PipelineLoss& loss, const Tree& target);
  const OptionalTensorMetas& input_grads() const { return input_grads_; }

  // Restores what the run has changed. Backward calls it; call it if there is no backward.
  void end();

 private:
  struct Run;
  using MakeArgs = std::function<Tree(Run&)>;
  void try_forward(std::vector<at::Tensor> given);
  void attempt(bool fake);
  void end_run();
  void run_backward(bool again_for_real, const std::function<void(Run&)>& body);
  void collect_input_grads(const Run& run, const std::vector<at::Tensor>& roots,
                           const std::vector<at::Tensor>& gradients);

  PipelineStage stage_;
  Kind kind_;
  MakeArgs make_args_;
  Tree kwargs_;
  std::vector<at::Tensor> given_;  // the caller's tensors among arguments and keyword arguments
  std::string tried_;              // the arguments, for error messages
  std::unique_ptr<Run> run_;       // between forward and the end
  TensorMetas outputs_;
  OptionalTensorMetas input_grads_;
  bool data_dependent_ = false;
};

}  // namespace penstock
