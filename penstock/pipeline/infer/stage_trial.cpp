#include "penstock/pipeline/infer/stage_trial.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/pipeline/contract/record_checks.h"
#include "penstock/pipeline/infer/trial_copies.h"
#include "penstock/pipeline/infer/trial_scope.h"
#include "penstock/pipeline/infer/trial_watch.h"
#include "penstock/pipeline/stage/gradient_sync.h"
#include "penstock/pipeline/stage/sharded_modules.h"
#include "penstock/pipeline/stage/stage_state.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/any_operator_hook.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/dispatch/switch_data.h"
#include "penstock/torch/fake/fake_parts.h"
#include "penstock/torch/fake/fake_watch.h"
#include "penstock/torch/tree/dense_layout.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock {

namespace {

at::Tensor filled(const TensorMeta& meta, const PipelineStage& stage, double value, bool requires_grad,
                  bool fake) {
  const at::NoGradGuard no_grad;
  const auto local = [&] {
    if (!fake) return make_raw_tensor(meta, stage.device()).fill_(value);
    const TensorRecord& record = local_record(meta);
    return make_fake_strided(record.shape(), record.stride(),
                             at::device(stage.device()).dtype(record.dtype()));
  };
  return tensor_from_local(stage, local(), meta).set_requires_grad(requires_grad);
}

// Under FakeMode a plain tensor takes part as if it were fake. The inner tensors of a distributed one are
// used below the mode, so they must be fake.
std::vector<at::Tensor> distributed_among(const StageModule& module) {
  std::vector<at::Tensor> found;
  for (const std::vector<at::Tensor>& tensors : {module.parameters(), module.buffers()})
    std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(found), is_distributed_tensor);
  return found;
}

StepContext trial_context() {
  StepContext context;
  context.microbatch = 0;
  context.trial = true;
  return context;
}

}  // namespace

// What a forward leaves for its backward, and the environment in which both run.
struct StageTrial::Run {
  Run(const PipelineStage& stage, bool is_fake, const std::vector<at::Tensor>& given)
      : fake(is_fake),
        real(is_fake ? nullptr : std::make_unique<RealLeaves>()),
        buffers(stage.module(), /*values=*/!is_fake),
        sharded(stage.module(), is_fake),
        copies(given, is_fake) {
    if (fake) {
      distributed.emplace(distributed_among(stage.module()));
    } else {
      generators.emplace(stage.device());
      std::vector<at::Tensor> registered = stage.parameters();
      for (const at::Tensor& buffer : stage.module().buffers()) registered.push_back(buffer);
      real_mode.emplace(registered);
      for (const at::Tensor& parameter : stage.parameters())
        if (is_marked_for_any_hook(parameter)) real_mode->add_stand_in(parameter);  // sharded: zeros
    }
  }
  ~Run() {
    if (real_mode) real_mode->put_back();
  }

  const bool fake;
  // A trial of another stage that has not ended may have made shared parameters fake.
  const std::unique_ptr<RealLeaves> real;
  const SavedBuffers buffers;
  std::optional<SavedGenerators> generators;
  const ShardedTrial sharded;
  std::optional<FakeLeaves> distributed;
  // Both modes record what is computed, for tensors that the module keeps.
  DeferredInit fake_mode;
  FakeWatch watch;
  std::optional<TrialWatch> real_mode;
  TrialCopies copies;
  std::vector<at::Tensor> inputs;
  Tree result;

  template <class Body>
  void inside(const PipelineStage& stage, bool grad, const Body& body) {
    const StepGuard step(trial_context());
    const NoGradientSync alone(gradient_syncs_of(stage.module()));
    // Weights cast to the autocast dtype here are fake, or belong to a graph of the trial.
    const OwnAutocastCache casts;
    const at::AutoGradMode grad_mode(grad);
    const ModeGuard mode(fake ? static_cast<Mode&>(fake_mode) : *real_mode);
    const FakeWatch::Guard watching(watch);
    body();
  }

  // A stand-in for a tensor that another stage would send.
  at::Tensor stand_in(const TensorMeta& meta, const PipelineStage& stage, double value, bool needs_grad) {
    const at::Tensor tensor = filled(meta, stage, value, needs_grad, fake);
    if (real_mode) real_mode->add_stand_in(tensor);
    return tensor;
  }

  // Tensors of the run that are still referenced elsewhere. Those that a real run would also have made get
  // its values; any use of the others is reported as an error.
  void settle_leftovers(const PipelineStage& stage) {
    inputs.clear();
    result = Tree();
    copies = TrialCopies({}, fake);
    const std::string why = fmt::format("{} made it in a trial run and kept it", to_text(stage));
    if (real_mode)
      for (const at::Tensor& tensor : real_mode->wrong_survivors()) {
        switch_data(tensor, to_fake(tensor.detach()));
        mark_leftover(tensor, why);
      }
    std::vector<at::Tensor> kept = watch.survivors();
    std::vector<at::Tensor> constants = kept;
    std::erase_if(constants, [](const at::Tensor& tensor) { return tensor.requires_grad(); });
    try {
      constants = fake_mode.replayable(constants);
      fake_mode.materialize(constants);
    } catch (const std::exception& error) {
      log().debug("pipeline: tensors that stage {} kept from its trial run could not be computed: {}",
                  stage.index(), error.what());
    }
    for (const at::Tensor& tensor : kept)
      if (is_fake(tensor)) mark_leftover(tensor, why);
  }
};

StageTrial::StageTrial(PipelineStage stage, Kind kind) : stage_(std::move(stage)), kind_(kind) {}

StageTrial::~StageTrial() { end(); }

void StageTrial::attempt(bool fake) {
  run_ = std::make_unique<Run>(stage_, fake, given_);
  Run& run = *run_;
  try {
    run.inside(stage_, kind_.has_backward, [&] {
      const Tree args = make_args_(run);
      const Tree kwargs =
          map_tree_tensors(kwargs_, [&](const at::Tensor& tensor) { return run.copies.of(tensor); });
      tried_ = fmt::format("args {}{}", args.to_string(),
                           kwargs.size() == 0 ? "" : ", kwargs " + kwargs.to_string());
      const auto& hook = stage_.options().trial_hooks.forward;
      run.result = hook ? hook(stage_.module(), args, kwargs) : stage_.module().forward(args, kwargs);
      outputs_ =
          kind_.ends ? metas_of(tensors_of(run.result)) : metas_of(stage_outputs(run.result, stage_.index()));
    });
  } catch (...) {
    end_run();
    throw;
  }
}

void StageTrial::end_run() {
  if (!run_) return;
  run_->settle_leftovers(stage_);
  run_.reset();
}

void StageTrial::try_forward(std::vector<at::Tensor> given) {
  for (const at::Tensor& tensor : tensors_of(kwargs_)) given.push_back(tensor);
  given_ = std::move(given);
  state_of(stage_).meshes.harvest(given_);
  const TrialRun wanted = stage_.options().trial;
  std::exception_ptr why_not_fake;
  if (wanted != TrialRun::Real) {
    try {
      return attempt(true);
    } catch (const DataDependentError&) {
      data_dependent_ = true;
      why_not_fake = std::current_exception();
    } catch (const PipeliningMetadataError&) {
      throw;
    } catch (...) {
      log().debug("pipeline: stage {} does not run on fake tensors, trying zeros: {}", stage_.index(),
                  current_exception_text());
      why_not_fake = std::current_exception();
    }
  }
  try {
    if (wanted == TrialRun::Fake) std::rethrow_exception(why_not_fake);
    attempt(false);
  } catch (const PipeliningMetadataError&) {
    throw;
  } catch (...) {
    std::throw_with_nested(
        StageForwardError(fmt::format("stage {} failed in its trial run{}: {}", stage_.index(),
                                      tried_.empty() ? "" : " with " + tried_, current_exception_text())));
  }
}

void StageTrial::forward(const Tree& args, const Tree& kwargs) {
  kwargs_ = kwargs;
  make_args_ = [args](Run& run) {
    return map_tree_tensors(args, [&](const at::Tensor& tensor) {
      run.inputs.push_back(run.copies.of(tensor));
      return run.inputs.back();
    });
  };
  try_forward(tensors_of(args));
}

void StageTrial::forward(const TensorMetas& inputs, const Tree& kwargs) {
  kwargs_ = kwargs;
  make_args_ = [this, inputs](Run& run) {
    std::vector<Tree> args;
    for (const TensorMeta& meta : inputs) {
      run.inputs.push_back(run.stand_in(meta, stage_, 0.0, kind_.has_backward && requires_grad(meta)));
      args.emplace_back(run.inputs.back());
    }
    return Tree::tuple(std::move(args));
  };
  try_forward({});
}

void StageTrial::end() {
  make_args_ = nullptr;
  kwargs_ = Tree();
  given_.clear();
  end_run();
}

void StageTrial::collect_input_grads(const Run& run, const std::vector<at::Tensor>& roots,
                                     const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& input : run.inputs)
    if (input.requires_grad()) wanted.push_back(input);
  std::vector<at::Tensor> found;
  if (!wanted.empty() && !roots.empty()) {
    if (const auto& hook = stage_.options().trial_hooks.input_grads) {
      found = hook(roots, wanted, gradients);
      if (found.size() != wanted.size())
        throw PipeliningMetadataError(
            describe(fmt::format("gradients from trial_hooks.input_grads of stage {}", stage_.index()),
                     fmt::format("{}", found.size()),
                     fmt::format("{}, one for each input that requires grad", wanted.size()),
                     "return an undefined tensor for an input without gradient"));
    } else {
      found = torch::autograd::grad(roots, wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    }
  }
  input_grads_.clear();
  std::size_t next = 0;
  for (const at::Tensor& input : run.inputs) {
    const bool has = input.requires_grad() && next < found.size() && found[next].defined();
    // As it is sent. For plain tensors the planner has the more accurate layout: that of their leaves.
    input_grads_.push_back(has ? std::optional(dense_meta(meta_of(found[next].detach()))) : std::nullopt);
    if (input.requires_grad()) ++next;
  }
}

void StageTrial::run_backward(bool again_for_real, const std::function<void(Run&)>& body) {
  if (!run_)
    throw PipeliningMetadataError(describe(fmt::format("stage {}", stage_.index()),
                                           "a trial backward without a trial forward", "both, forward first",
                                           "report this: the pipeline runs them in order"));
  const auto run_body = [&] {
    try {
      run_->inside(stage_, true, [&] { body(*run_); });
    } catch (...) {
      end_run();
      throw;
    }
  };
  const bool may_be_real = again_for_real && run_->fake && stage_.options().trial != TrialRun::Fake;
  try {
    run_body();
    return end();
  } catch (const PipeliningMetadataError&) {
    throw;
  } catch (const std::exception& error) {
    if (!may_be_real) throw;
    log().debug("pipeline: the backward of stage {} does not run on fake tensors, trying real ones: {}",
                stage_.index(), error.what());
  }
  attempt(/*fake=*/false);
  run_body();
  end();
}

void StageTrial::backward(const OptionalTensorMetas& output_grads) {
  run_backward(true, [&](Run& run) {
    const std::vector<at::Tensor> outputs = tensors_of(run.result);
    if (outputs.size() != output_grads.size())
      throw PipeliningMetadataError(describe(
          fmt::format("gradients of the outputs of stage {}", stage_.index()),
          fmt::format("{}", output_grads.size()), fmt::format("{}, one for each output", outputs.size()),
          "make the next stage take every output as an input"));
    std::vector<at::Tensor> roots, gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!output_grads[i]) continue;
      if (!outputs[i].requires_grad())
        throw PipeliningMetadataError(
            describe(fmt::format("gradient of output {} of stage {}", i, stage_.index()),
                     to_string(output_grads[i]), "nothing, because the output needs no gradient",
                     "make the stages agree on which tensors need gradients"));
      roots.push_back(outputs[i]);
      gradients.push_back(run.stand_in(*output_grads[i], stage_, 1.0, false));
    }
    collect_input_grads(run, roots, gradients);
  });
}

void StageTrial::backward_of_loss(const PipelineLoss& loss, const Tree& target) {
  const bool distributed =
      run_ && std::any_of(run_->inputs.begin(), run_->inputs.end(), is_distributed_tensor);
  run_backward(distributed, [&](Run& run) {
    TrialCopies copies(tensors_of(target), run.fake);
    const at::Tensor value = loss(run.result, map_tree_tensors(target, [&](const at::Tensor& tensor) {
                                    return copies.of(tensor).set_requires_grad(false);
                                  }));
    if (value.defined() && value.requires_grad()) {
      collect_input_grads(run, {value}, {at::ones_like(value)});
    } else {
      collect_input_grads(run, {}, {});
    }
  });
}

}  // namespace penstock
