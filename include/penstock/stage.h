// One stage of a pipeline: a part of the model, and what is known about the tensors that pass its borders.
//
//   PipelineStage stage(block, /*index=*/1, /*count=*/4, at::kCPU);                    // shapes are found out by a trial run
//   PipelineStage stage(block, 1, 4, at::kCPU, {.input_args = {{x}}, .output_args = {{y}}});   // shapes are given: no trial run
//   Schedule1F1B schedule(stage, 8, mse_loss, {world});
//
// A stage takes the outputs of the stage before it as positional arguments; the first one takes the arguments of `step`. Keyword
// arguments are those given to `step` on the same rank. Between stages travel tensors, one or a tuple of them, of any dtype, with or
// without gradient, plain or distributed; the last stage may return anything.
//
// Examples. They stand for one microbatch. Whether an example requires grad decides which gradients flow back; where none of a stage's
// output examples does, every one of floating point is taken to. With examples of inputs and outputs
// on all stages the pipeline is static: nothing is tried. Else it is dynamic: every stage makes a trial run, on fake tensors where the
// module allows it, so that parameters, buffers, random numbers and memory are untouched; else on zeros and copies of the arguments, after
// which buffers and random state are put back. Trials communicate nothing. A module can ask StepContext::current()->trial. What the trial
// finds counts; where examples of a part of the stages differ from it, a warning says so. A trial is repeated when something changes that its
// result may depend on: shapes, plain values, requires_grad, train or eval mode (docs/pipeline.md).
//
// A handle: copies are the same stage. One thread uses a stage.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/dtensor/tensor/mesh_cache.h"
#include "penstock/errors.h"
#include "penstock/stage_module.h"
#include "penstock/pipeline/contract/stage_meta.h"

namespace penstock {

// How shapes are found out where no examples are given.
enum class TrialRun {
  Auto,  // fake, and where that is not possible (values are read, an operator has no shape function) real
  Fake,  // an operator that cannot run on fake tensors is an error
  Real,
};

// What a trial run does, where that is not simply to run the module and autograd. Called within the trial: under its StepContext, on
// its tensors, which are fake or zeros. Either may be left out.
struct TrialHooks {
  // Instead of the module's forward. A module that is expensive, or cannot be tried, gives tensors like its outputs here.
  std::function<Tree(const StageModule& module, const Tree& args, const Tree& kwargs)> forward;
  // Instead of autograd: the gradients of `inputs`, which all require one, from those of `outputs`. One for each input, undefined where
  // none comes. At the last stage the only output is the loss.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& output_grads)> input_grads;
};

// Makes the function that computes the weight gradients of the microbatch whose backward has just run; see StageOptions.
using WeightStepBuilder = std::function<std::function<void()>()>;

// A tensor that goes from one stage to a later one past those between. `from` gives it as its last outputs, `to` takes it as its last
// positional inputs; where a stage has several, in the order in which they are declared.
struct SkipTensor {
  std::string name;
  int from = 0;
  int to = 0;
};

struct StageOptions {
  // Example tensors, or nothing. Entries of gradients may be undefined.
  std::optional<std::vector<at::Tensor>> input_args, output_args, input_grads, output_grads;
  TrialRun trial = TrialRun::Auto;
  TrialHooks trial_hooks;
  // Shapes of the outputs depend on values: each transfer of them is announced before. A trial run that finds an operator of that
  // kind sets it by itself.
  bool announce_shapes = false;
  // The stage splits its backward itself: a whole backward runs where the schedule has B or I, then `weight_step_builder` is
  // called; what it returns runs at once (B) or where the schedule has W.
  WeightStepBuilder weight_step_builder;
  // The weight gradients of DeferredLinear layers (deferred_linear.h) wait for the last backward of the stage in a step and are computed
  // for all microbatches at once: one product for each weight. Faster where microbatches are small; inputs and output gradients of these
  // layers stay in memory for it. The same value, not the same last bit.
  bool join_weight_gradients = false;
  // Finds the meshes of distributed activations that arrive. Those of the examples and of the parameters are known.
  MeshGroupsCallback find_mesh;
  // Compare every tensor that enters or leaves the stage with its record in full: dtype, shape, stride, placements. For what comes from
  // other ranks, senders tell what they have made ahead of each transfer, in the whole pipeline as soon as one of its stages validates.
  // Default: at debug level detail. The cheap part (number, dtype, shape) is always compared.
  std::optional<bool> validate;
};

// A module, a loss or a hook of the user failed in a forward, for real or in a trial run: with stage, microbatch and a summary of the
// arguments. The cause, whatever its type, is nested (std::rethrow_if_nested).
class StageForwardError : public Error {
 public:
  using Error::Error;
};
// The same for what runs in a backward: autograd functions, hooks of tensors, weight steps of one's own.
class StageBackwardError : public Error {
 public:
  using Error::Error;
};

struct StageState;

class PipelineStage {
 public:
  // Throws ValueError for an index outside [0, count) and for examples that contradict each other, PipeliningMetadataError for
  // gradients that do not fit their tensors.
  PipelineStage(StageModule module, int index, int count, at::Device device, StageOptions options = {});

  int index() const;
  int count() const;
  bool is_first() const { return index() == 0; }
  bool is_last() const { return index() == count() - 1; }
  at::Device device() const;
  const StageModule& module() const;
  const StageOptions& options() const;

  // From the examples; unset where there are none.
  const StageMeta& example_meta() const;
  // Whether this stage alone would need a trial run (a pipeline is static only when no stage does).
  bool needs_trial(bool has_backward) const;
  // StageOptions::validate, or its default.
  bool validates() const;

  std::vector<at::Tensor> parameters() const { return module().parameters(); }
  MeshCache& meshes() const;

 private:
  std::shared_ptr<StageState> state_;
};

// "stage 1 of 4".
std::string to_text(const PipelineStage& stage);

// What a stage hands on, out of what its module returned: a tensor is a tuple of one, a list a tuple. Throws
// PipeliningMetadataError for anything that is no tensor.
std::vector<at::Tensor> stage_outputs(const Tree& result, int stage);

// What a stage computes with, out of the local part that arrived and the record that was agreed on: a distributed tensor is put
// together on the stage's mesh, a plain one is the local part itself. Nothing is compared between ranks; no graph leads to the
// local part. Throws PipeliningMetadataError for a local part that requires grad and for a mesh that is not known.
at::Tensor tensor_from_local(const PipelineStage& stage, const at::Tensor& local, const TensorMeta& meta);

}  // namespace penstock
