// Executes the forwards and backwards of one stage, microbatch by microbatch, and holds the tensors that they
// pass on.
//
//   runner.begin_step(has_backward, microbatches);
//   runner.take_inputs(m, 0, activations);          // from the previous stage; then the skip tensors
//   runner.forward(m, context, args, kwargs);
//   send(runner.give_outputs(m, 0, n));             // each output once: the stage does not keep it
//   ...
//   runner.take_output_grads(m, 0, gradients);
//   runner.backward(m, ...);                        // or backward_input, and later backward_weight
//   send(runner.give_input_grads(m, 0, n));
//
// Tensors taken and given are local parts, in any layout. Distributed tensors are assembled from their
// records here.
// Memory: an output is kept until it is given away, unless the graph needs it; the graph is kept until its
// backward; after the first half of a split backward only what the second half needs is kept.
// Thread safety: one thread.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/deferred_linear.h"
#include "penstock/pipeline/backward/split_backward.h"
#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/pipeline/infer/stage_plan.h"
#include "penstock/pipeline/stage/gradient_sync.h"
#include "penstock/pipeline/stage/sharded_modules.h"
#include "penstock/stage.h"
#include "penstock/stage_module.h"
#include "penstock/step_context.h"

namespace penstock {

class StageRunner {
 public:
  // `begins` and `ends`: whether the stage is the first or the last one of its chain; the last one computes
  // the loss. `by_blocks` keeps the blocks of a chain apart, so that they can be interleaved with others.
  // `synced` is the microbatch for which modules may reduce their gradients, the one whose weight gradients
  // come last (gradient_sync.h).
  StageRunner(PipelineStage stage, bool begins, bool ends, PipelineLoss loss, bool by_blocks,
              std::optional<int> synced = {});
  ~StageRunner();
  StageRunner(StageRunner&&) noexcept;

  const PipelineStage& stage() const { return stage_; }

  // Discards everything of an earlier step, including an aborted one. `plans`: by microbatch.
  void begin_step(bool has_backward, std::vector<const StagePlan*> plans);

  // `metas` are the announced records of the tensors; without them the records of the plan apply.
  void take_inputs(int microbatch, std::size_t first, std::vector<at::Tensor> tensors,
                   OptionalTensorMetas metas = {});
  std::vector<at::Tensor> give_outputs(int microbatch, std::size_t first, std::size_t count);
  void take_output_grads(int microbatch, std::size_t first, std::vector<at::Tensor> tensors,
                         OptionalTensorMetas metas = {});
  std::vector<at::Tensor> give_input_grads(int microbatch, std::size_t first, std::size_t count);

  // For announced channels. made_metas returns the records of what the stage has made (outputs, or gradients
  // of inputs) before it is given away. check_announced compares the announcement of another stage with the
  // plan: kind and dtype always, shape unless it varies, and the layout if the stage validates. Throws
  // PipeliningMetadataError.
  OptionalTensorMetas made_metas(int microbatch, bool outputs, std::size_t first, std::size_t count) const;
  void check_announced(int microbatch, bool inputs, std::size_t place, const TensorMeta& announced,
                       bool varies) const;

  // Records that the tensors taken for the microbatch will be used on this stream, whichever stream their
  // memory belongs to.
  void record_stream(int microbatch, const c10::Stream& stream) const;

  // Work in parts: each call of `advance` runs one block and returns whether there are more. forward() and
  // the backwards run all of them.
  class Forward;
  class Backward;

  // `args` is used only on the first stage of a chain, `target` only on the last.
  void forward(int microbatch, const StepContext& context, const Tree& args, const Tree& kwargs,
               const Tree& target);
  void backward(int microbatch, const StepContext& context);
  void backward_input(int microbatch, const StepContext& context);
  void backward_weight(int microbatch, const StepContext& context);

  // The same, to be advanced block by block.
  std::unique_ptr<Forward> start_forward(int microbatch, const StepContext& context, const Tree& args,
                                         const Tree& kwargs, const Tree& target);
  std::unique_ptr<Backward> start_backward(int microbatch, const StepContext& context, bool input_only);

  // For the last stage, by microbatch: what the module returned, without its graph, and the loss.
  const Tree& result(int microbatch) const;
  // Whether results are kept until the next step; otherwise result() is empty.
  void set_keeps_results(bool keeps) { keeps_results_ = keeps; }
  const at::Tensor& loss(int microbatch) const;

  // Number of microbatches whose forward has begun and whose last backward (B or W) has not ended.
  int live() const { return live_; }

  // Computes the weight gradients that were deferred to the last backward of the step, if the stage requests
  // that; call it after everything that other ranks wait for has been sent. Does nothing if they have been
  // computed already.
  void run_joined_weights();

  // Reduces the gradients of sharded modules; once per step.
  void reduce_gradients();
  ShardedModules& sharded() { return sharded_; }

 private:
  friend class Forward;
  friend class Backward;
  struct Chunk;
  Chunk& chunk(int microbatch, const char* action);
  std::vector<at::Tensor> wrap_inputs(Chunk& chunk, int microbatch);
  void check_outputs(const Chunk& chunk, int microbatch, const std::vector<at::Tensor>& outputs) const;
  void finish_forward(Chunk& chunk, int microbatch, const Tree& result, const Tree& target);
  bool joins_weights() const;
  // After the last backward of a microbatch.
  void finish_weights(Chunk& chunk, int microbatch);
  template <class Describe, class Body>
  void in_backward(int microbatch, const Describe& what, const Body& body) const;
  void finish_backward(Chunk& chunk, int microbatch, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> input_grads);
  void check_chunk(int microbatch, const char* action) const;
  // Disables gradient reduction for all microbatches of a training step but `synced_`.
  std::optional<NoGradientSync> alone(int microbatch) const;
  bool validates() const { return validate_; }
  std::string at_microbatch(int microbatch) const;
  template <class Made>
  void log_made(int microbatch, const char* action, const Made& made) const;

  PipelineStage stage_;
  bool begins_;
  bool ends_;
  PipelineLoss loss_;
  bool by_blocks_;
  bool validate_;
  std::optional<int> synced_;
  bool keeps_results_ = true;
  GradientSyncs syncs_;
  ShardedModules sharded_;
  bool reduces_ = false;  // gradients of sharded modules are not yet reduced in this step
  bool has_backward_ = false;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  int live_ = 0;
  std::unique_ptr<WeightQueue> joined_;  // of all microbatches of the step, if the stage requests that
};

class StageRunner::Forward {
 public:
  ~Forward();
  // Runs the next block. False after the last one.
  bool advance();

 private:
  friend class StageRunner;
  struct State;
  explicit Forward(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class StageRunner::Backward {
 public:
  ~Backward();
  bool advance();

 private:
  friend class StageRunner;
  struct State;
  explicit Backward(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace penstock
