#include "penstock/pipeline/runtime/stage_runner.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/base/warnings.h"
#include "penstock/deferred_linear.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/mesh_cache.h"
#include "penstock/errors.h"
#include "penstock/pipeline/contract/record_checks.h"
#include "penstock/pipeline/stage/stage_state.h"
#include "penstock/torch/tree/dense_layout.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock {

// The state of one microbatch in the stage.
struct StageRunner::Chunk {
  const StagePlan* plan = nullptr;
  enum class Phase { Empty, Forwarded, InputDone, Done } phase = Phase::Empty;

  // For each block: the leaves it started from, and where its graph ends. A stage that is not run by blocks
  // has one.
  struct Block {
    std::vector<at::Tensor> inputs;
    OutputEdges outputs;
  };
  std::vector<at::Tensor> inputs;  // as they arrived
  std::vector<Block> blocks;
  std::vector<at::Tensor> outputs;       // to be sent
  std::vector<at::Tensor> output_grads;  // as they arrived
  std::vector<at::Tensor> input_grads;   // to be sent
  // For announced channels: the records that arrived, which replace those of the plan, and the records of
  // what was made.
  OptionalTensorMetas input_metas, output_grad_metas, made_outputs, made_input_grads;
  std::vector<WeightBackward> weights;
  WeightQueue deferred;  // of layers that were used by this microbatch
  std::function<void()> weight_step;
  Tree result;
  at::Tensor loss;
};

StageRunner::StageRunner(PipelineStage stage, bool begins, bool ends, PipelineLoss loss, bool by_blocks,
                         std::optional<int> synced)
    : stage_(std::move(stage)),
      begins_(begins),
      ends_(ends),
      loss_(std::move(loss)),
      by_blocks_(by_blocks),
      validate_(penstock::validates(stage_)),
      synced_(synced),
      syncs_(gradient_syncs_of(stage_.module())),
      sharded_(stage_.module()) {}
bool StageRunner::joins_weights() const { return stage_.options().join_weight_gradients; }

StageRunner::~StageRunner() = default;
StageRunner::StageRunner(StageRunner&&) noexcept = default;

void StageRunner::begin_step(bool has_backward, std::vector<const StagePlan*> plans) {
  has_backward_ = has_backward;
  live_ = 0;
  sharded_.begin_step();
  reduces_ = has_backward && sharded_.any();
  if (joins_weights()) joined_ = std::make_unique<WeightQueue>();  // discards what a failed step has left
  chunks_.clear();
  for (const StagePlan* plan : plans) {
    chunks_.push_back(plan == nullptr ? nullptr : std::make_unique<Chunk>());
    if (plan == nullptr) continue;
    Chunk& chunk = *chunks_.back();
    chunk.plan = plan;
    chunk.inputs.resize(plan->meta.inputs->size());
    chunk.output_grads.resize(plan->meta.outputs->size());
  }
}

void StageRunner::check_chunk(int microbatch, const char* action) const {
  const auto count = static_cast<int>(chunks_.size());
  if (count == 0)
    throw StateError(
        describe(fmt::format("{} of microbatch {} on stage {}", action, microbatch, stage_.index()),
                 "no step has begun", "a running step", "let the schedule's step() run the actions"));
  if (microbatch < 0 || microbatch >= count || !chunks_[static_cast<std::size_t>(microbatch)])
    throw StateError(describe(
        fmt::format("{} on stage {}", action, stage_.index()), fmt::format("microbatch {}", microbatch),
        fmt::format("one of the {} microbatches of the step that this stage runs", count),
        "use a schedule made for this number of microbatches"));
}

std::optional<NoGradientSync> StageRunner::alone(int microbatch) const {
  if (!has_backward_ || microbatch == synced_ || syncs_.empty()) return std::nullopt;
  return std::optional<NoGradientSync>(std::in_place, syncs_);
}

void StageRunner::record_stream(int microbatch, const c10::Stream& stream) const {
  check_chunk(microbatch, "streams");
  const Chunk& of = *chunks_[static_cast<std::size_t>(microbatch)];
  for (const auto* tensors : {&of.inputs, &of.output_grads})
    for (const at::Tensor& tensor : *tensors)
      if (tensor.defined() && tensor.device() == stream.device()) tensor.record_stream(stream);
}

StageRunner::Chunk& StageRunner::chunk(int microbatch, const char* action) {
  check_chunk(microbatch, action);
  return *chunks_[static_cast<std::size_t>(microbatch)];
}

namespace {

template <class Entries>
void take(Entries from, std::size_t first, std::size_t of, Entries& into, const char* what) {
  PENSTOCK_INVARIANT(first + from.size() <= of, what);
  into.resize(of);
  std::move(from.begin(), from.end(), into.begin() + static_cast<std::ptrdiff_t>(first));
}

// The records of what has arrived: as announced, or else as in the plan.
const TensorMeta& arrived_meta(const OptionalTensorMetas& announced, std::size_t i,
                               const TensorMeta& agreed) {
  return i < announced.size() && announced[i] ? *announced[i] : agreed;
}

bool any_announced(const StagePlan& plan) {
  const auto any = [](const std::vector<bool>& flags) {
    return std::find(flags.begin(), flags.end(), true) != flags.end();
  };
  return plan.checked || any(plan.varying_inputs) || any(plan.varying_outputs);
}

}  // namespace

void StageRunner::take_inputs(int microbatch, std::size_t first, std::vector<at::Tensor> tensors,
                              OptionalTensorMetas metas) {
  Chunk& into = chunk(microbatch, "inputs");
  const std::size_t count = into.inputs.size();
  take(std::move(tensors), first, count, into.inputs, "more tensors arrived than the stages have agreed on");
  if (!metas.empty())
    take(std::move(metas), first, count, into.input_metas,
         "more tensors were announced than the stages have agreed on");
}

void StageRunner::take_output_grads(int microbatch, std::size_t first, std::vector<at::Tensor> tensors,
                                    OptionalTensorMetas metas) {
  Chunk& into = chunk(microbatch, "gradients");
  const std::size_t count = into.output_grads.size();
  take(std::move(tensors), first, count, into.output_grads,
       "more gradients arrived than the stages have agreed on");
  if (!metas.empty())
    take(std::move(metas), first, count, into.output_grad_metas,
         "more gradients were announced than the stages have agreed on");
}

OptionalTensorMetas StageRunner::made_metas(int microbatch, bool outputs, std::size_t first,
                                            std::size_t count) const {
  check_chunk(microbatch, "records");
  const Chunk& of = *chunks_[static_cast<std::size_t>(microbatch)];
  const OptionalTensorMetas& made = outputs ? of.made_outputs : of.made_input_grads;
  PENSTOCK_INVARIANT(first + count <= made.size(), "a tensor is announced that the stage has not made");
  return {made.begin() + static_cast<std::ptrdiff_t>(first),
          made.begin() + static_cast<std::ptrdiff_t>(first + count)};
}

std::string StageRunner::at_microbatch(int microbatch) const {
  return fmt::format("stage {}, microbatch {}", stage_.index(), microbatch);
}

// At debug level; `made` returns a Tree.
template <class Made>
void StageRunner::log_made(int microbatch, const char* action, const Made& made) const {
  if (log().should_log(spdlog::level::debug)) [[unlikely]]
    log().debug("pipeline: {}: {} made {}", at_microbatch(microbatch), action, made().to_string());
}

void StageRunner::check_announced(int microbatch, bool inputs, std::size_t place, const TensorMeta& announced,
                                  bool varies) const {
  check_chunk(microbatch, "announcement");
  const StageMeta& meta = chunks_[static_cast<std::size_t>(microbatch)]->plan->meta;
  const TensorMeta& agreed = inputs ? (*meta.inputs)[place] : *(*meta.output_grads)[place];
  const TensorRecord &got = local_record(announced), &expected = local_record(agreed);
  bool fits = is_distributed(announced) == is_distributed(agreed) && got.dtype() == expected.dtype() &&
              (varies || got.shape() == expected.shape());
  // A trial run cannot predict the memory layout of the local parts of a distributed gradient.
  if (fits && validates() && !varies && (inputs || !is_distributed(announced)))
    fits = differences(comparable_meta(agreed), comparable_meta(announced)).empty();
  if (!fits)
    throw PipeliningMetadataError(describe(
        fmt::format("{} {} of {}, as it was received", inputs ? "input" : "gradient of output", place,
                    at_microbatch(microbatch)),
        to_string(announced), to_string(agreed),
        "pass examples that match the tensors of real steps, or pass none and let a trial run infer them"));
}

namespace {

std::vector<at::Tensor> give(std::vector<at::Tensor>& from, std::size_t first, std::size_t count,
                             const char* what) {
  PENSTOCK_INVARIANT(first + count <= from.size(), what);
  const auto begin = from.begin() + static_cast<std::ptrdiff_t>(first);
  return {std::make_move_iterator(begin),
          std::make_move_iterator(begin + static_cast<std::ptrdiff_t>(count))};
}

std::string summary(const Tree& args, const Tree& kwargs) {
  return fmt::format("args {}{}", args.to_string(),
                     kwargs.size() == 0 ? "" : ", kwargs " + kwargs.to_string());
}

// Leaves of autograd in place of the outputs of the previous block.
std::vector<at::Tensor> fresh_leaves(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& tensor : tensors)
    leaves.push_back(tensor.detach().set_requires_grad(tensor.requires_grad()));
  return leaves;
}

Tree tuple_of(const std::vector<at::Tensor>& tensors) {
  return Tree::tuple(std::vector<Tree>(tensors.begin(), tensors.end()));
}

}  // namespace

std::vector<at::Tensor> StageRunner::give_outputs(int microbatch, std::size_t first, std::size_t count) {
  return give(chunk(microbatch, "outputs").outputs, first, count, "an output that the stage has not made");
}

std::vector<at::Tensor> StageRunner::give_input_grads(int microbatch, std::size_t first, std::size_t count) {
  return give(chunk(microbatch, "gradients").input_grads, first, count,
              "a gradient that the stage has not made");
}

std::vector<at::Tensor> StageRunner::wrap_inputs(Chunk& chunk, int microbatch) {
  std::vector<at::Tensor> inputs;
  const TensorMetas& metas = *chunk.plan->meta.inputs;
  for (std::size_t i = 0; i < metas.size(); ++i) {
    at::Tensor& arrived = chunk.inputs[i];
    if (!arrived.defined())
      throw PipeliningMetadataError(describe(
          fmt::format("input {} of stage {}, microbatch {}", i, stage_.index(), microbatch),
          "nothing arrived", to_string(metas[i]), "make the schedule receive it before the forward"));
    const TensorMeta& meta = arrived_meta(chunk.input_metas, i, metas[i]);
    at::Tensor input = tensor_from_local(stage_, arrived, meta);
    // A separate leaf, because the buffer may be the output of a stage on this rank.
    if (!is_distributed(meta)) input = input.detach();
    input.set_requires_grad(has_backward_ && requires_grad(metas[i]));
    if (validates()) check_announced(microbatch, true, i, meta_of(input), chunk.plan->varies_input(i));
    inputs.push_back(std::move(input));
    arrived.reset();
  }
  return inputs;
}

namespace {

// The mesh must match as well: equal placements on another mesh mean other parts.
bool lies_as(const at::Tensor& tensor, const DistributedRecord& record) {
  return placements_of(tensor) == record.placements() && answers(mesh_of(tensor), record.mesh_key());
}

}  // namespace

void StageRunner::check_outputs(const Chunk& chunk, int microbatch,
                                const std::vector<at::Tensor>& outputs) const {
  const TensorMetas& metas = *chunk.plan->meta.outputs;
  const auto refuse = [&](const std::string& what, const std::string& actual, const std::string& expected,
                          const char* remedy) {
    throw PipeliningMetadataError(
        describe(fmt::format("{} of stage {}, microbatch {}", what, stage_.index(), microbatch), actual,
                 expected, remedy));
  };
  if (outputs.size() != metas.size())
    refuse("outputs", fmt::format("{} tensors", outputs.size()), fmt::format("{}, as agreed", metas.size()),
           "return the same number of tensors every time");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    const auto* whole = std::get_if<DistributedRecord>(&metas[i]);
    const std::vector<std::int64_t>& shape =
        whole != nullptr ? whole->global_shape() : local_record(metas[i]).shape();
    const bool shape_fits = chunk.plan->varies_output(i) || output.sizes() == at::IntArrayRef(shape);
    const bool kind_fits = is_distributed_tensor(output) == (whole != nullptr) &&
                           output.scalar_type() == local_record(metas[i]).dtype();
    if (!shape_fits || !kind_fits || (whole != nullptr && !lies_as(output, *whole)))
      refuse(fmt::format("output {}", i), to_string(meta_of(output)), to_string(metas[i]),
             "return what the example or the trial run returned, or set announce_shapes for shapes that "
             "depend on values");
    if (has_backward_ && output.requires_grad() && !requires_grad(metas[i]))
      refuse(fmt::format("output {}", i), "it needs a gradient", "an output that needs none, as agreed",
             "set requires_grad on the example, or detach the output");
  }
  for (std::size_t i = 0; i < outputs.size() && validates(); ++i)
    if (!chunk.plan->varies_output(i))
      check_meta(fmt::format("stage {} outputs, microbatch {}[{}]", stage_.index(), microbatch, i),
                 comparable_meta(metas[i]), comparable_meta(meta_of(outputs[i])), OnMismatch::Raise);
}

void StageRunner::finish_forward(Chunk& chunk, int microbatch, const Tree& result, const Tree& target) {
  std::vector<at::Tensor> roots;
  if (ends_) {
    // The result returned to the user has no graph, so it does not keep the graph alive, and nothing done
    // later changes it.
    if (keeps_results_)
      chunk.result = map_tree_tensors(result, [](const at::Tensor& tensor) { return tensor.detach(); });
    if (loss_ && (has_backward_ || !target.is_none())) {
      at::Tensor loss;
      try {
        loss = loss_(result, target);
      } catch (...) {
        std::throw_with_nested(StageForwardError(fmt::format("{}: loss failed with output {}, target {}: {}",
                                                             at_microbatch(microbatch), result.to_string(),
                                                             target.to_string(), current_exception_text())));
      }
      if (!loss.defined() || loss.numel() != 1)
        throw ValueError(describe(fmt::format("loss of microbatch {}", microbatch),
                                  loss.defined() ? to_string(meta_of(loss)) : "nothing",
                                  "a tensor with one element", "reduce the loss over the microbatch"));
      chunk.loss = loss.detach();
      roots.push_back(loss);
      if (has_backward_) chunk.output_grads.assign(1, at::Tensor());
    }
  } else {
    roots = stage_outputs(result, stage_.index());
    check_outputs(chunk, microbatch, roots);
    const bool announces = any_announced(*chunk.plan);
    for (const at::Tensor& output : roots) {
      chunk.outputs.push_back(local_if_distributed(output, kDetach));
      if (announces) chunk.made_outputs.emplace_back(meta_of(output));
    }
  }
  if (has_backward_) {
    chunk.blocks.back().outputs = OutputEdges::of(roots);
  } else {
    chunk.blocks.clear();
  }
  chunk.phase = has_backward_ ? Chunk::Phase::Forwarded : Chunk::Phase::Done;
}

struct StageRunner::Forward::State {
  StageRunner& runner;
  Chunk& chunk;
  int microbatch;
  StepContext context;
  Tree args;
  Tree kwargs;
  Tree target;
  std::size_t next = 0;
};

StageRunner::Forward::Forward(std::unique_ptr<State> state) : state_(std::move(state)) {}
StageRunner::Forward::~Forward() = default;

bool StageRunner::Forward::advance() {
  State& s = *state_;
  StageRunner& runner = s.runner;
  const StageModule& module = runner.stage_.module();
  const std::size_t blocks = runner.by_blocks_ ? module.block_count() : 1;
  const StepGuard step(s.context);
  const auto alone = runner.alone(s.microbatch);
  const at::AutoGradMode grad_mode(runner.has_backward_);
  std::optional<WeightQueueGuard> deferring;
  if (runner.has_backward_) deferring.emplace(runner.joins_weights() ? *runner.joined_ : s.chunk.deferred);
  Tree result;
  try {
    const StageModule& block = runner.by_blocks_ ? module.block(s.next) : module;
    result = block.forward(s.args, blocks == 1 || block.takes_kwargs() ? s.kwargs : Tree());
  } catch (...) {
    std::throw_with_nested(
        StageForwardError(fmt::format("{}: forward failed with {}: {}", runner.at_microbatch(s.microbatch),
                                      summary(s.args, s.kwargs), current_exception_text())));
  }
  if (++s.next == blocks) {
    runner.finish_forward(s.chunk, s.microbatch, result, s.target);
    runner.log_made(s.microbatch, "forward", [&]() -> const Tree& { return result; });
    s.args = s.kwargs = s.target = Tree();
    return false;
  }
  const std::vector<at::Tensor> between = stage_outputs(result, runner.stage_.index());
  if (runner.has_backward_) s.chunk.blocks.back().outputs = OutputEdges::of(between);
  s.chunk.blocks.emplace_back();
  s.chunk.blocks.back().inputs = fresh_leaves(between);
  s.args = tuple_of(s.chunk.blocks.back().inputs);
  return true;
}

std::unique_ptr<StageRunner::Forward> StageRunner::start_forward(int microbatch, const StepContext& context,
                                                                 const Tree& args, const Tree& kwargs,
                                                                 const Tree& target) {
  Chunk& of = chunk(microbatch, "forward");
  if (of.phase != Chunk::Phase::Empty)
    throw StateError(describe(fmt::format("forward of microbatch {} on stage {}", microbatch, stage_.index()),
                              "it has run already", "once in a step",
                              "validate the schedule before it is executed"));
  of.blocks.emplace_back();
  if (has_backward_) ++live_;
  Tree inputs = args;
  if (!begins_) {
    of.blocks.back().inputs = wrap_inputs(of, microbatch);
    inputs = tuple_of(of.blocks.back().inputs);
  } else if (validates()) {
    check_metas(fmt::format("stage {} inputs, microbatch {}", stage_.index(), microbatch),
                *of.plan->meta.inputs, tensors_of(args));
  }
  return std::unique_ptr<Forward>(new Forward(std::unique_ptr<Forward::State>(
      new Forward::State{*this, of, microbatch, context, std::move(inputs), kwargs, target})));
}

// Adds the stage to what user code throws in a backward. Errors of communication keep their type, because the
// waiting code knows more.
template <class Describe, class Body>
void StageRunner::in_backward(int microbatch, const Describe& what, const Body& body) const {
  try {
    body();
  } catch (const CommError&) {
    throw;
  } catch (...) {
    std::throw_with_nested(StageBackwardError(
        fmt::format("{}: {}: {}", at_microbatch(microbatch), what(), current_exception_text())));
  }
}

struct StageRunner::Backward::State {
  StageRunner& runner;
  Chunk& chunk;
  int microbatch;
  StepContext context;
  bool input_only;
  std::vector<at::Tensor> gradients;  // of the outputs of the block whose backward is next
};

StageRunner::Backward::Backward(std::unique_ptr<State> state) : state_(std::move(state)) {}
StageRunner::Backward::~Backward() = default;

bool StageRunner::Backward::advance() {
  State& s = *state_;
  StageRunner& runner = s.runner;
  const StepGuard step(s.context);
  const auto alone = runner.alone(s.microbatch);
  Chunk::Block block = std::move(s.chunk.blocks.back());
  s.chunk.blocks.pop_back();
  std::vector<at::Tensor> input_grads;
  runner.in_backward(
      s.microbatch, [&] { return "backward failed with gradients " + tuple_of(s.gradients).to_string(); },
      [&] {
        if (s.input_only && !runner.stage_.options().weight_step_builder) {
          InputBackward half = stage_backward_input(std::move(block.outputs), s.gradients, block.inputs);
          input_grads = std::move(half.input_grads);
          s.chunk.weights.push_back(std::move(half.weights));
        } else {
          input_grads = stage_backward(std::move(block.outputs), s.gradients, block.inputs);
        }
      });
  if (!s.chunk.blocks.empty()) {
    s.gradients = std::move(input_grads);
    return true;
  }
  s.gradients.clear();
  runner.finish_backward(s.chunk, s.microbatch, block.inputs, std::move(input_grads));
  runner.log_made(s.microbatch, "backward", [&] { return tuple_of(s.chunk.input_grads); });
  block.inputs.clear();
  if (const WeightStepBuilder& builder = runner.stage_.options().weight_step_builder) {
    runner.in_backward(
        s.microbatch, [] { return "the weight step of the stage failed"; },
        [&] {
          std::function<void()> weight_step = builder();
          if (s.input_only) {
            s.chunk.weight_step = std::move(weight_step);
          } else if (weight_step) {
            weight_step();
          }
        });
  }
  s.chunk.phase = s.input_only ? Chunk::Phase::InputDone : Chunk::Phase::Done;
  if (!s.input_only) runner.finish_weights(s.chunk, s.microbatch);
  return false;
}

std::unique_ptr<StageRunner::Backward> StageRunner::start_backward(int microbatch, const StepContext& context,
                                                                   bool input_only) {
  Chunk& of = chunk(microbatch, "backward");
  if (of.phase != Chunk::Phase::Forwarded)
    throw StateError(
        describe(fmt::format("backward of microbatch {} on stage {}", microbatch, stage_.index()),
                 of.phase == Chunk::Phase::Empty ? "its forward has not run"
                                                 : "it has run already, or the step has no backward",
                 "once in a step, after the forward", "validate the schedule before it is executed"));
  std::vector<at::Tensor> gradients;
  if (ends_) {
    if (of.loss.defined())
      gradients.push_back(at::full({}, context.loss_scale, of.loss.options()).expand(of.loss.sizes()));
  } else {
    const OptionalTensorMetas& metas = *of.plan->meta.output_grads;
    for (std::size_t i = 0; i < metas.size(); ++i) {
      at::Tensor& arrived = of.output_grads[i];
      if (arrived.defined() != metas[i].has_value())
        throw PipeliningMetadataError(describe(
            fmt::format("gradient of output {} of stage {}, microbatch {}", i, stage_.index(), microbatch),
            arrived.defined() ? "one arrived" : "nothing arrived", to_string(metas[i]),
            "make the schedule receive it before the backward"));
      gradients.push_back(
          arrived.defined()
              ? tensor_from_local(stage_, arrived, arrived_meta(of.output_grad_metas, i, *metas[i]))
              : at::Tensor());
      if (validates() && arrived.defined())
        check_announced(microbatch, false, i, meta_of(gradients.back()), of.plan->varies_output(i));
      arrived.reset();
    }
    // A gradient that arrives for an output that turned out to need none is dropped.
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (!of.blocks.back().outputs.needs_grad(i)) gradients[i].reset();
  }
  return std::unique_ptr<Backward>(new Backward(std::unique_ptr<Backward::State>(
      new Backward::State{*this, of, microbatch, context, input_only, std::move(gradients)})));
}

void StageRunner::finish_backward(Chunk& chunk, int microbatch, const std::vector<at::Tensor>& inputs,
                                  std::vector<at::Tensor> input_grads) {
  if (begins_) return;
  const OptionalTensorMetas& metas = *chunk.plan->meta.input_grads;
  PENSTOCK_INVARIANT(input_grads.size() == metas.size(), "a backward returns one gradient for each input");
  const bool announces = any_announced(*chunk.plan);
  for (std::size_t i = 0; i < metas.size(); ++i) {
    const at::Tensor& gradient = input_grads[i];
    const bool varies = chunk.plan->varies_input(i);
    const auto refuse = [&](const std::string& actual, const std::string& expected, const char* remedy) {
      throw PipeliningMetadataError(describe(
          fmt::format("gradient of input {} of {}", i, at_microbatch(microbatch)), actual, expected, remedy));
    };
    if (!metas[i]) {
      if (gradient.defined())
        refuse(to_string(meta_of(gradient)), "nothing, as agreed",
               "pass example gradients (input_grads) if the use of an input depends on values");
      chunk.input_grads.emplace_back();
      if (announces) chunk.made_input_grads.emplace_back();
      continue;
    }
    const auto* whole = std::get_if<DistributedRecord>(&*metas[i]);
    const TensorRecord& agreed = local_record(*metas[i]);
    if (!gradient.defined()) {
      // The input was not used this time.
      if (varies && whole != nullptr && placements_of(inputs[i]) != whole->placements())
        refuse("nothing, because the input was not used", to_string(metas[i]),
               "use every distributed input whose shape depends on values");
      const std::vector<std::int64_t> shape = varies || whole == nullptr
                                                  ? local_if_distributed(inputs[i], kDetach).sizes().vec()
                                                  : agreed.shape();
      chunk.input_grads.push_back(at::zeros(shape, at::device(stage_.device()).dtype(agreed.dtype())));
    } else {
      if ((whole != nullptr) != is_distributed_tensor(gradient) ||
          (whole != nullptr && !lies_as(gradient, *whole)))
        refuse(to_string(meta_of(gradient)), to_string(metas[i]),
               "redistribute the activation in the module, so that its gradient has the agreed placements");
      chunk.input_grads.push_back(local_if_distributed(gradient, kDetach));
    }
    const at::Tensor& local = chunk.input_grads.back();
    const auto made = [&]() -> TensorMeta {
      if (whole == nullptr) return record_of(local);
      return DistributedRecord(record_of(local), inputs[i].sizes().vec(),
                               (gradient.defined() ? gradient : inputs[i]).strides().vec(),
                               whole->placements(), whole->mesh_key());
    };
    bool fits =
        local.scalar_type() == agreed.dtype() && (varies || local.sizes() == at::IntArrayRef(agreed.shape()));
    if (fits && validates() && !varies && whole == nullptr && gradient.defined())
      fits = differences(comparable_meta(*metas[i]), comparable_meta(made())).empty();
    if (!fits)
      refuse(to_string(made()), to_string(metas[i]),
             "pass example gradients (input_grads) like those that autograd makes, or pass none");
    if (announces) chunk.made_input_grads.emplace_back(made());
  }
}

void StageRunner::forward(int microbatch, const StepContext& context, const Tree& args, const Tree& kwargs,
                          const Tree& target) {
  const auto run = start_forward(microbatch, context, args, kwargs, target);
  while (run->advance()) {
  }
}

void StageRunner::backward(int microbatch, const StepContext& context) {
  const auto run = start_backward(microbatch, context, false);
  while (run->advance()) {
  }
}

void StageRunner::backward_input(int microbatch, const StepContext& context) {
  const auto run = start_backward(microbatch, context, true);
  while (run->advance()) {
  }
}

void StageRunner::backward_weight(int microbatch, const StepContext& context) {
  Chunk& of = chunk(microbatch, "weight backward");
  if (of.phase != Chunk::Phase::InputDone)
    throw StateError(
        describe(fmt::format("weight backward of microbatch {} on stage {}", microbatch, stage_.index()),
                 "no split backward is pending", "one, from the input backward of this step",
                 "validate the schedule before it is executed"));
  const StepGuard step(context);
  const auto without_sync = alone(microbatch);
  of.phase = Chunk::Phase::Done;
  in_backward(
      microbatch, [] { return "weight backward failed"; },
      [&] {
        if (const auto weight_step = std::exchange(of.weight_step, nullptr)) weight_step();
        for (WeightBackward& weights : std::exchange(of.weights, {}))
          if (weights.pending()) weights.run();
      });
  finish_weights(of, microbatch);
}

void StageRunner::finish_weights(Chunk& chunk, int microbatch) {
  --live_;
  in_backward(
      microbatch, [] { return "weight gradients failed"; }, [&] { chunk.deferred.run(); });
}

void StageRunner::reduce_gradients() {
  if (!std::exchange(reduces_, false)) return;
  sharded_.reduce();
}

void StageRunner::run_joined_weights() {
  if (!joined_) return;
  joined_->join_layers();
  joined_->run();
}

const Tree& StageRunner::result(int microbatch) const {
  check_chunk(microbatch, "result");
  return chunks_[static_cast<std::size_t>(microbatch)]->result;
}

const at::Tensor& StageRunner::loss(int microbatch) const {
  check_chunk(microbatch, "loss");
  return chunks_[static_cast<std::size_t>(microbatch)]->loss;
}

}  // namespace penstock
