// A trial run of one stage: what its outputs and gradients are like, found out without changing anything.
//
//   StageTrial trial(stage, {.has_backward = true, .ends = false});
//   trial.forward(input_metas, kwargs);               // or the real arguments, at the first stage
//   send(trial.outputs());
//   ...
//   trial.backward(output_gradient_metas);            // or backward_of_loss, at the last stage
//   send(trial.input_grads());
//
// Runs on fake tensors where it can, sharded and tensor-parallel stages too; else on zeros and on copies of the arguments, with everything that it
// has written and random state put back when the trial ends. Gradients of parameters are never touched, and nothing is communicated. A tensor
// that the module makes in the run and keeps has the values of a real run when the trial ends, if those depend on nothing that was fake or zero;
// else a real operator on it is a StateError that says so.
// Lives for one microbatch signature, on one thread. Trials of several stages end in reverse order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/pipeline/stage/pipeline_loss.h"
#include "penstock/stage.h"
#include "penstock/pipeline/contract/stage_meta.h"

namespace penstock::pipeline {

class StageTrial {
 public:
  struct Kind {
    bool has_backward = false;
    bool ends = false;  // the last stage of its chain, whose result is not sent
  };
  StageTrial(PipelineStage stage, Kind kind);
  ~StageTrial();

  // Throws StageForwardError when the module fails, PipeliningMetadataError for outputs that cannot travel (not at the last stage).
  void forward(const Tree& args, const Tree& kwargs);
  void forward(const TensorMetas& inputs, const Tree& kwargs);

  // At the last stage that returns something else than tensors: empty.
  const TensorMetas& outputs() const { return outputs_; }
  // An operator was met whose result depends on values: shapes may change from microbatch to microbatch.
  bool data_dependent() const { return data_dependent_; }

  // Metas of the gradients that come back, one for each output. Throws PipeliningMetadataError for another number, and for a
  // gradient of an output that needs none.
  void backward(const OptionalTensorMetas& output_grads);
  // What fails on fake tensors is tried on real ones where gradients cannot be derived otherwise, that is for distributed inputs.
  void backward_of_loss(const PipelineLoss& loss, const Tree& target);
  const OptionalTensorMetas& input_grads() const { return input_grads_; }

  // Puts back what the run has changed. Backward does it; for a caller that makes none.
  void end();

 private:
  struct Run;
  using MakeArgs = std::function<Tree(Run&)>;
  void try_forward(std::vector<at::Tensor> given);
  void attempt(bool fake);
  void end_run();
  void run_backward(bool again_for_real, const std::function<void(Run&)>& body);
  void collect_input_grads(const Run& run, const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients);

  PipelineStage stage_;
  Kind kind_;
  MakeArgs make_args_;
  Tree kwargs_;
  std::vector<at::Tensor> given_;  // the caller's tensors among arguments and keyword arguments
  std::string tried_;              // the arguments, for errors
  std::unique_ptr<Run> run_;       // between forward and the end
  TensorMetas outputs_;
  OptionalTensorMetas input_grads_;
  bool data_dependent_ = false;
};

}  // namespace penstock::pipeline
