#include "penstock/pipeline/stage_trial.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <exception>
#include <mutex>
#include <optional>

#include "penstock/base/errors.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/pipeline/gradient_sync.h"
#include "penstock/pipeline/sharded_modules.h"
#include "penstock/torch/dense_layout.h"
#include "penstock/torch/distributed_type.h"
#include "penstock/torch/fake.h"
#include "penstock/torch/record_checks.h"
#include "penstock/torch/step_context.h"

namespace penstock::pipeline {

namespace {

// Random state and buffers as they were, when it ends.
class Untouched {
 public:
  explicit Untouched(const PipelineStage& stage) : buffers_(stage.module().buffers()) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : buffers_) copies_.push_back(buffer.clone());
    add_generator(at::globalContext().defaultGenerator(at::kCPU));
    if (stage.device().is_cuda()) add_generator(at::globalContext().defaultGenerator(stage.device()));
  }
  ~Untouched() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(copies_[i]);
    for (auto& [generator, state] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;

 private:
  void add_generator(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    at::Tensor state = generator.get_state();
    generators_.emplace_back(std::move(generator), std::move(state));
  }

  std::vector<at::Tensor> buffers_, copies_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
};

at::Tensor filled(const TensorMeta& meta, const PipelineStage& stage, double value, bool requires_grad, bool fake) {
  const at::NoGradGuard no_grad;
  at::Tensor tensor;
  if (fake) {
    const TensorRecord& record = local_record(meta);
    tensor = make_fake_strided(record.shape(), record.stride(), at::device(stage.device()).dtype(record.dtype()));
  } else {
    tensor = tensor_from_local(stage, make_raw_tensor(meta, stage.device()).fill_(value), meta);
  }
  return tensor.set_requires_grad(requires_grad);
}

bool any_distributed(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (is_distributed_tensor(tensor)) return true;
  return false;
}

StepContext trial_context() {
  StepContext context;
  context.microbatch = 0;
  context.trial = true;
  return context;
}

}  // namespace

// What a forward leaves for its backward, and the world in which both run.
struct StageTrial::Run {
  bool fake = false;
  std::vector<at::Tensor> inputs;
  Tree result;

  template <class Body>
  void inside(const PipelineStage& stage, bool grad, const Body& body) {
    const StepGuard step(trial_context());
    const NoGradientSync alone(gradient_syncs_of(stage.module()));
    const ShardedTrial sharded(stage.module());
    const at::AutoGradMode grad_mode(grad);
    if (fake) {
      FakeMode mode;
      const ModeGuard guard(mode);
      body();
    } else {
      const Untouched untouched(stage);
      body();
    }
  }
};

StageTrial::StageTrial(PipelineStage stage, bool has_backward) : stage_(std::move(stage)), has_backward_(has_backward) {}
StageTrial::~StageTrial() = default;

template <class MakeArgs>
void StageTrial::try_forward(const MakeArgs& make_args, const Tree& kwargs) {
  std::string tried;  // the arguments, for errors
  const auto attempt = [&](bool fake) {
    auto run = std::make_unique<Run>();
    run->fake = fake;
    run->inside(stage_, has_backward_, [&] {
      const Tree args = make_args(fake, run->inputs);
      // Leaves of their own: a trial must not reach what the caller's tensors hang on.
      const Tree own_kwargs = map_tree_tensors(kwargs, [&](const at::Tensor& tensor) {
        const at::Tensor leaf = fake && !is_distributed_tensor(tensor) ? to_fake(tensor.detach()) : tensor.detach();
        return leaf.set_requires_grad(tensor.requires_grad());
      });
      tried = fmt::format("args {}{}", args.to_string(), own_kwargs.size() == 0 ? "" : ", kwargs " + own_kwargs.to_string());
      const auto& hook = stage_.options().trial_hooks.forward;
      run->result = hook ? hook(stage_.module(), args, own_kwargs) : stage_.module().forward(args, own_kwargs);
      const bool travels = !stage_.is_last();
      outputs_.clear();
      if (travels) {
        outputs_ = metas_of(stage_outputs(run->result, stage_.index()));
      } else {
        for (const at::Tensor& tensor : tensors_of(run->result)) outputs_.push_back(meta_of(tensor));
      }
    });
    run_ = std::move(run);
  };

  const TrialRun wanted = stage_.options().trial;
  const bool may_be_fake = wanted != TrialRun::Real && !any_distributed(stage_.parameters());
  std::exception_ptr why_not_fake;
  if (wanted == TrialRun::Fake || may_be_fake) {
    try {
      return attempt(true);
    } catch (const DataDependentError&) {
      data_dependent_ = true;
      why_not_fake = std::current_exception();
    } catch (const PipeliningMetadataError&) {
      throw;
    } catch (...) {
      log().debug("pipeline: stage {} does not run on fake tensors, trying zeros: {}", stage_.index(), current_exception_text());
      why_not_fake = std::current_exception();
    }
  }
  try {
    if (wanted == TrialRun::Fake) std::rethrow_exception(why_not_fake);
    attempt(false);
  } catch (const PipeliningMetadataError&) {
    throw;
  } catch (...) {
    std::throw_with_nested(StageForwardError(fmt::format("stage {} failed in its trial run{}: {}", stage_.index(), tried.empty() ? "" : " with " + tried, current_exception_text())));
  }
}

void StageTrial::forward(const Tree& args, const Tree& kwargs) {
  try_forward(
      [&](bool fake, std::vector<at::Tensor>& inputs) {
        return map_tree_tensors(args, [&](const at::Tensor& tensor) {
          const at::Tensor leaf = (fake ? to_fake(tensor.detach()) : tensor.detach()).set_requires_grad(tensor.requires_grad());
          inputs.push_back(leaf);
          return leaf;
        });
      },
      kwargs);
}

void StageTrial::forward(const TensorMetas& inputs, const Tree& kwargs) {
  try_forward(
      [&](bool fake, std::vector<at::Tensor>& tensors) {
        std::vector<Tree> args;
        for (const TensorMeta& meta : inputs) {
          if (fake && is_distributed(meta)) throw StateError("distributed tensors do not run on fake ones");
          tensors.push_back(filled(meta, stage_, 0.0, has_backward_ && requires_grad(meta), fake));
          args.emplace_back(tensors.back());
        }
        return Tree::tuple(std::move(args));
      },
      kwargs);
}

void StageTrial::collect_input_grads(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& input : run_->inputs)
    if (input.requires_grad()) wanted.push_back(input);
  std::vector<at::Tensor> found;
  if (!wanted.empty() && !roots.empty()) {
    if (const auto& hook = stage_.options().trial_hooks.input_grads) {
      found = hook(roots, wanted, gradients);
      if (found.size() != wanted.size())
        throw PipeliningMetadataError(describe(fmt::format("gradients from trial_hooks.input_grads of stage {}", stage_.index()), fmt::format("{}", found.size()),
                                               fmt::format("{}, one for each input that requires grad", wanted.size()), "return an undefined tensor for an input without gradient"));
    } else {
      found = torch::autograd::grad(roots, wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
    }
  }
  std::size_t next = 0;
  for (const at::Tensor& input : run_->inputs) {
    const bool has = input.requires_grad() && next < found.size() && found[next].defined();
    // As it travels. Of plain tensors the planner knows the layout better: that of their leaves.
    input_grads_.push_back(has ? std::optional(dense_meta(meta_of(found[next].detach()))) : std::nullopt);
    if (input.requires_grad()) ++next;
  }
}

void StageTrial::backward(const OptionalTensorMetas& output_grads) {
  if (!run_) throw PipeliningMetadataError(describe(fmt::format("stage {}", stage_.index()), "a trial backward without a trial forward", "both, forward first", "report this: the pipeline runs them in order"));
  const auto run = std::move(run_);
  run_ = std::make_unique<Run>();
  run_->inputs = run->inputs;
  const std::vector<at::Tensor> outputs = tensors_of(run->result);
  if (outputs.size() != output_grads.size())
    throw PipeliningMetadataError(describe(fmt::format("gradients of the outputs of stage {}", stage_.index()), fmt::format("{}", output_grads.size()),
                                           fmt::format("{}, one for each output", outputs.size()), "let the next stage take every output as an input"));
  run->inside(stage_, true, [&] {
    std::vector<at::Tensor> roots, gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!output_grads[i]) continue;
      if (!outputs[i].requires_grad())
        throw PipeliningMetadataError(describe(fmt::format("gradient of output {} of stage {}", i, stage_.index()), to_string(output_grads[i]),
                                               "nothing, for the output needs no gradient", "let the stages agree on which tensors need gradients"));
      roots.push_back(outputs[i]);
      gradients.push_back(filled(*output_grads[i], stage_, 1.0, false, run->fake));
    }
    collect_input_grads(roots, gradients);
  });
  run_.reset();
}

void StageTrial::backward_of_loss(const PipelineLoss& loss, const Tree& target) {
  if (!run_) throw PipeliningMetadataError(describe(fmt::format("stage {}", stage_.index()), "a trial backward without a trial forward", "both, forward first", "report this: the pipeline runs them in order"));
  Run& run = *run_;
  run.inside(stage_, true, [&] {
    const Tree own_target = map_tree_tensors(target, [&](const at::Tensor& tensor) {
      return run.fake && !is_distributed_tensor(tensor) ? to_fake(tensor.detach()) : tensor.detach();
    });
    const at::Tensor value = loss(run.result, own_target);
    if (value.defined() && value.requires_grad()) {
      collect_input_grads({value}, {at::ones_like(value)});
    } else {
      collect_input_grads({}, {});
    }
  });
  run_.reset();
}

}  // namespace penstock::pipeline
