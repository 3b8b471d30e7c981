// One stage of a pipeline: a part of the model, and what is known about the tensors that cross its borders.
//
//   PipelineStage first(block, 0, 2, at::kCPU);  // shapes are inferred by a trial run
//   PipelineStage second(block, 1, 2, at::kCPU, {.input_args = {{x}}, .output_args = {{y}}});  // given
//   Schedule1F1B schedule(first, 8, mse_loss, {world});
//
// A stage takes the outputs of the previous stage as positional arguments; the first one takes the arguments
// of `step`. Keyword arguments are those passed to `step` on the same rank. Stages exchange tensors: one, or
// a tuple or list of them, of any dtype, with or without gradients, plain or distributed. The last stage may
// return anything.
//
// Examples describe one microbatch. Whether an example requires grad decides which gradients flow back; if
// none of a stage's output examples does, every floating-point one is assumed to. If all stages have examples
// of inputs and outputs, and in training also of the gradients if any of them is distributed, the pipeline is
// static: it runs no trial as long as the arguments of `step` match the examples of the first stage.
// Otherwise every stage makes a trial run: on fake tensors if the module allows it, so that parameters,
// buffers, random numbers and memory are untouched; else on zeros and copies of the arguments, after which
// buffers and random state are restored. Trials do not communicate; a module can check
// StepContext::current()->trial. The result of a trial takes precedence over examples, with a warning where
// they differ. A trial is repeated when something changes that its result may depend on: shapes, plain
// values, requires_grad, train or eval mode (docs/pipeline.md).
//
// A PipelineStage is a handle: copies refer to the same stage. Thread safety: one thread uses a stage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/pytree.h"
#include "penstock/stage_module.h"
#include "penstock/world.h"

namespace penstock {

// How shapes are inferred where no examples are given.
enum class TrialRun {
  Auto,  // fake, or real where fake is impossible (values are read, an operator has no shape function)
  Fake,  // an operator that cannot run on fake tensors is an error
  Real,  // on zeros and copies
};

// Replaces parts of a trial run. Both are called within the trial: under its StepContext, on its tensors,
// which are fake or zeros. Either may be empty.
struct TrialHooks {
  // Replaces the module's forward. A module that is expensive or cannot be tried returns tensors like its
  // outputs here.
  std::function<Tree(const StageModule& module, const Tree& args, const Tree& kwargs)> forward;
  // Replaces autograd: returns the gradients of `inputs`, which all require one, computed from those of
  // `outputs`. One for each input, undefined where there is none. On the last stage the only output is the
  // loss.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& outputs,
                                        const std::vector<at::Tensor>& inputs,
                                        const std::vector<at::Tensor>& output_grads)>
      input_grads;
};

// Returns the function that computes the weight gradients of the microbatch whose backward has just run; see
// StageOptions.
using WeightStepBuilder = std::function<std::function<void()>()>;

// Finds the mesh of this rank that a key from another rank refers to; std::nullopt if there is none.
using FindMesh = std::function<std::optional<comm::MeshGroups>(const MeshKey& key)>;

// A tensor that travels from one stage to a later one, past the stages between them. `from` returns it among
// its last outputs, `to` takes it among its last positional inputs; several are in the order of their
// declaration.
struct SkipTensor {
  std::string name;  // for errors and drawings
  int from = 0;      // index of the stage that returns it
  int to = 0;        // index of the stage that takes it
};

// Options of a stage.
struct StageOptions {
  std::optional<std::vector<at::Tensor>> input_args;    // example inputs
  std::optional<std::vector<at::Tensor>> output_args;   // example outputs
  std::optional<std::vector<at::Tensor>> input_grads;   // example input gradients; entries may be undefined
  std::optional<std::vector<at::Tensor>> output_grads;  // example output gradients; entries may be undefined
  TrialRun trial = TrialRun::Auto;                      // how shapes are inferred without examples
  TrialHooks trial_hooks;                               // replaces parts of the trial
  // The shapes of outputs depend on values: every transfer of them is announced first. Not needed if a trial
  // finds an operator of that kind, or if the shapes of inputs are announced: the stage then announces its
  // outputs as well.
  bool announce_shapes = false;
  // The stage splits its backward itself: a whole backward runs where the schedule has B or I, then the
  // builder is called; what it returns runs at once (B) or where the schedule has W.
  WeightStepBuilder weight_step_builder;
  // Weight gradients of DeferredLinear layers (deferred_linear.h) wait for the last backward of the stage in
  // a step and are computed for all microbatches at once, one product per weight. Faster for small
  // microbatches; the layers' inputs and output gradients stay in memory until then. Equal up to rounding.
  bool join_weight_gradients = false;
  // Finds the meshes of distributed activations that arrive. Those of the examples and of the parameters are
  // known.
  FindMesh find_mesh;
  // Compares every tensor that enters or leaves the stage with its record in full: dtype, shape, stride,
  // placements. Senders announce each transfer, in the whole pipeline as soon as one stage validates.
  // Default: at debug level "detail". The cheap part (number, dtype, shape) is always compared.
  std::optional<bool> validate;
};

// A module, a loss or a hook of the user failed in a forward or a trial run. Names the stage, in a step also
// the microbatch, and summarizes the arguments. The cause, of any type, is nested (std::rethrow_if_nested).
class StageForwardError : public Error {
 public:
  using Error::Error;
};

// The same for what runs in a backward: autograd functions, tensor hooks, weight steps,
// PipelineOptions::gradients_done. A CommError thrown there keeps its type.
class StageBackwardError : public Error {
 public:
  using Error::Error;
};

// Internal.
struct StageState;

// A stage of this rank. The whole pipeline has `count` stages, numbered over all ranks.
class PipelineStage {
 public:
  // Throws ValueError for an index outside [0, count) and for example gradients without their tensors,
  // PipeliningMetadataError for example gradients that do not fit their tensors.
  PipelineStage(StageModule module, int index, int count, at::Device device, StageOptions options = {});

  // Position in the whole pipeline.
  int index() const;
  // Number of stages of the whole pipeline.
  int count() const;
  // Whether it is stage 0, which takes the arguments of `step`. In a bidirectional schedule the first stage
  // of the second direction takes them too, but is_first() is false there.
  bool is_first() const { return index() == 0; }
  // Whether it is the last stage, which computes the loss. In a bidirectional schedule the last stage of the
  // first direction computes it too, but is_last() is false there.
  bool is_last() const { return index() == count() - 1; }
  // Where its parameters and activations are.
  at::Device device() const;
  // What it computes.
  const StageModule& module() const;
  // As given to the constructor.
  const StageOptions& options() const;
  // Parameters of its modules, each tensor once.
  std::vector<at::Tensor> parameters() const { return module().parameters(); }

 private:
  friend StageState& state_of(const PipelineStage& stage);
  std::shared_ptr<StageState> state_;
};

// Returns "stage 1 of 4".
std::string to_text(const PipelineStage& stage);

}  // namespace penstock
