// A trial run of one stage: what its outputs and gradients are like, found out without changing anything.
//
//   StageTrial trial(stage, has_backward);
//   trial.forward(input_metas, kwargs);               // or the real arguments, at the first stage
//   send(trial.outputs());
//   ...
//   trial.backward(output_gradient_metas);            // or backward_of_loss, at the last stage
//   send(trial.input_grads());
//
// Runs on fake tensors where it can; else on zeros, with buffers and random state put back afterwards. Gradients of parameters
// are never touched. Lives for one microbatch signature, on one thread.
#pragma once

#include <memory>
#include <vector>

#include "penstock/pipeline/pipeline_loss.h"
#include "penstock/pipeline/stage.h"
#include "penstock/torch/stage_meta.h"

namespace penstock::pipeline {

class StageTrial {
 public:
  StageTrial(PipelineStage stage, bool has_backward);
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
  void backward_of_loss(const PipelineLoss& loss, const Tree& target);
  const OptionalTensorMetas& input_grads() const { return input_grads_; }

 private:
  struct Run;
  template <class MakeArgs>
  void try_forward(const MakeArgs& make_args, const Tree& kwargs);
  void collect_input_grads(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients);

  PipelineStage stage_;
  bool has_backward_;
  std::unique_ptr<Run> run_;  // between forward and backward
  TensorMetas outputs_;
  OptionalTensorMetas input_grads_;
  bool data_dependent_ = false;
};

}  // namespace penstock::pipeline
