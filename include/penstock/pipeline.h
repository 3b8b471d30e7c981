// Pipelines: schedules executed over the stages of this rank.
//
//   PipelineStage stage(block, world.rank(), world.size(), at::kCPU);
//   Schedule1F1B pipeline(stage, 8, mse_loss, {world});
//   StepResult result = pipeline.step(Tree::tuple({x}), {}, y);  // forward and backward of 8 microbatches
//   optimizer.step();                                            // gradients are in .grad()
//   StepResult evaluated = pipeline.eval(Tree::tuple({x}));      // forward only, with any schedule
//   auto custom = pipeline_from_csv(csv, {stage}, mse_loss, {world});  // a schedule of your own
//   const int count = 2 * world.size();                          // two stages on each rank, in a V
//   PipelineStage down(block, world.rank(), count, at::kCPU);
//   PipelineStage up(block, count - 1 - world.rank(), count, at::kCPU);
//   auto by_name = make_pipeline("ZBVZeroBubble", {down, up}, 8, mse_loss, {world});
//
// Every rank of the pipeline calls `step`: with the arguments of the first stage if it has that stage, its
// keyword arguments, and the target if it has the last stage. Arguments are split into microbatches
// (microbatch.h).
//
// Gradients are added to .grad(), so steps accumulate; with scale_grads those of this step are first divided
// by the number of microbatches. In a bidirectional schedule both copies of a part end with the same sum.
//
// Errors. Arguments that a rank rejects (no batch, too few rows, no target, unknown keywords, no loss) and
// ranks that do different things are found before anything is sent: the call fails on every rank, and the
// next one may succeed. What goes wrong later on one rank (a module throws, tensors do not fit, a rank dies)
// ends the step on all ranks within the deadline: with the error itself there, elsewhere with a PeerLostError
// that quotes it. The pipeline is unusable after that. A TimeoutError or PeerLostError ends with a report of
// where every rank is and who holds up whom; with PENSTOCK_STALL_DIR set, the report is also written to
// stall-rank<r>.json there.
// Thread safety: one thread; every rank runs its steps in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/generators.h"
#include "penstock/microbatch.h"
#include "penstock/schedule.h"
#include "penstock/stage.h"
#include "penstock/step_context.h"
#include "penstock/world.h"

namespace penstock {

// What a front end that cuts a model into stages knows about the result; the runtime compares it with its
// schedule.
struct PipeInfo {
  std::string description;             // the outer graph, or what was cut where; quoted in errors
  int stages = 0;                      // parts of the model; a bidirectional pipeline runs each part twice
  bool has_loss_and_backward = false;  // whether it was cut for training
};

// The dtype of floating-point tensors between stages.
enum class BorderDtype {
  Same,      // as computed
  BFloat16,  // 16 bits; tensors that have 16 bits already are unchanged
  Float8     // 8 bits (e4m3), with a scale for each 128 values
};

// How tensors travel between stages on different ranks. Stages of one rank pass tensors on unchanged.
struct BorderOptions {
  // Activations and gradients are rounded to this. StepReport::border tells the error.
  BorderDtype dtype = BorderDtype::Same;
  // Ranks that run the same stages on the same values, such as tensor-parallel ranks: each sends its share of
  // a tensor, and the receivers gather the shares from each other. Values are unchanged. Tensors that are
  // split over ranks already are sent as they are. All of these ranks must set it, in all stages.
  std::optional<comm::Group> equal_ranks = {};
};

// What this rank sent to other stages in a step.
struct BorderReport {
  std::int64_t bytes = 0;     // of tensors
  double squared_error = 0;   // sum over the values that were rounded, of the squared errors
  double squared_values = 0;  // sum of their squares
};

// Options of a pipeline. `world` has no default.
struct PipelineOptions {
  comm::World world;            // the processes
  std::vector<int> ranks = {};  // ranks of the pipeline in order; empty: all ranks of the world
  // Divide the gradients of a step by the number of microbatches: for losses that are means.
  bool scale_grads = true;
  SplitSpecs split = {};                              // how args and kwargs are split
  Tree target_split = {};                             // how the target is split
  Tree output_merge = {};                             // how the results of microbatches are merged
  std::vector<SkipTensor> skips = {};                 // tensors that skip stages
  std::uint64_t seed = 0;                             // StepContext::seed
  double loss_scale = 1.0;                            // the loss is multiplied by this before backward
  comm::P2PTransport p2p = comm::P2PTransport::Auto;  // Auto: World::low_latency_transport()
  // How many actions ahead receives are posted; each costs a buffer.
  int post_ahead = 2;
  std::optional<PipeInfo> info = {};  // from the front end that cut the model
  // False: StepResult has losses only; outputs of the last stage are freed with their graphs.
  bool return_outputs = true;
  // StepContext::rows: which rows of a microbatch these are, where replicas share it.
  std::optional<BatchRows> rows = {};
  // Records training steps on the CUDA device that all stages are on and replays them as one launch: for
  // stages so small that the host cannot keep up with the device. For each kind of arguments (structure,
  // shapes, strides, dtypes, plain values) and each loss scale, the first step runs as usual and the second
  // is recorded; the eight kinds used last are kept. Decisions of the host are fixed by the recording:
  // branches, counters, train or eval mode (`record_again` discards it). Tensors among the arguments must be
  // on the device and not require grad. A .grad() that was undefined before a step becomes memory of the
  // recording, which later steps overwrite. The constructor throws ValueError for pipelines over several
  // ranks, stages that are not on one CUDA device, sharded stages and `gradients_done`; modules that read
  // values back or use keyed dropout fail in their first steps.
  bool device_graph = false;
  // Called in a training step at REDUCE_GRAD: .grad() of the stage's own parameters is complete and scaled,
  // except for parameters shared with another stage of this rank and for copies in bidirectional schedules.
  // If .grad() held earlier gradients, it is this step's gradient alone. It may start communication that the
  // caller waits for after the step.
  std::function<void(int stage)> gradients_done = {};
  BorderOptions borders = {};  // how tensors travel between ranks
  // In units that pair a forward with a backward (DualPipe, DualPipeV), one computes while the other waits
  // for an exchange of rows between expert-parallel ranks. Results have the same bits. Backwards of such
  // units run on a thread of the pipeline; on CUDA a forward must then not run a backward of its own. All
  // ranks that run the same stages must set it alike. Without effect if stages are on several kinds of
  // devices.
  bool overlap_exchanges = false;
};

// What a step returns, without graphs.
struct StepResult {
  // On ranks with a last stage: the merged results of the microbatches, unless
  // PipelineOptions::return_outputs is false.
  std::optional<Tree> output;
  // On ranks with a last stage: one per microbatch, in order. Empty in an evaluation without a loss or a
  // target.
  std::vector<at::Tensor> losses;
};

// Facts about the last step.
struct StepReport {
  // Highest number of (stage, microbatch) pairs whose forward has run and whose backward has not ended.
  int peak_live_microbatches = 0;
  int trials = 0;          // trial runs of this rank's stages since the beginning
  bool is_static = false;  // all stages have the examples they need; see stage.h
  // Replayed from a recording; the other fields are from when it was recorded.
  bool replayed = false;
  int units_on_two_streams = 0;  // overlapped units whose forward and backward ran concurrently on CUDA
  // Exchanges between expert-parallel ranks during which the other half of an overlapped unit computed.
  int overlapped_exchanges = 0;
  BorderReport border;  // what this rank sent to other ranks
};

// Executes one schedule over the stages of this rank. The classes below name the usual schedules.
class PipelineRuntime {
 public:
  // [collective over the pipeline] `schedule` may be compute-only or lowered. Throws ValueError if the stages
  // are not those that the schedule places on this rank, if PipelineOptions::ranks does not contain this
  // rank, and if schedule, ranks and PipelineOptions::info contradict each other; ScheduleError for a
  // schedule that cannot run.
  PipelineRuntime(std::vector<PipelineStage> stages, schedule::Schedule schedule, PipelineLoss loss,
                  PipelineOptions options);
  // Releases the pipeline; not collective.
  ~PipelineRuntime();
  // Moved-from runtimes can only be destroyed.
  PipelineRuntime(PipelineRuntime&&) noexcept;

  // [collective over the pipeline] Connects all channels by transfers of one element, so that no step pays
  // for it. The first step does so if this was not called; calling it again does nothing. Fails like a step.
  void warm_up();

  // [collective over the pipeline] Runs forward and backward of all microbatches. Throws StateError without a
  // loss.
  StepResult step(const Tree& args = {}, const Tree& kwargs = {}, const Tree& target = {});
  // [collective over the pipeline] Runs forward only. Returns losses if there are a loss and a target.
  StepResult eval(const Tree& args = {}, const Tree& kwargs = {}, const Tree& target = {});

  // Number of microbatches of the schedule.
  int n_microbatches() const;
  // The lowered schedule.
  const schedule::Schedule& schedule() const;
  // Position of this rank along the pipeline.
  int rank() const;
  // Stages of this rank in order.
  std::vector<PipelineStage>& stages();
  // Facts about the last step. Waits for the device if BorderOptions::dtype is narrower than the tensors.
  StepReport report() const;

  // [collective over the pipeline] Writes what all ranks did in the last step, and when, to a file on the
  // first rank; Perfetto and `penstock trace` read it. Throws ConfigError there if writing fails; StateError
  // before the first step, after a failed or a replayed one; PipeliningMetadataError there if the last steps
  // of the ranks differ.
  void write_trace(const std::string& path);

  // Called after each instruction of later training steps, on the thread that runs them, for profilers. Pass
  // an empty function to remove it.
  void set_instruction_observer(std::function<void()> observer);

  // Loss scale of later steps.
  void set_loss_scale(double scale);
  // The loss scale in use.
  double loss_scale() const;
  // Step number of the next training step in StepContext; later steps continue from it. Starts at 0.
  void set_step(std::int64_t step);
  // With PipelineOptions::device_graph: discards the recordings; the next step runs as usual, the one after
  // it is recorded.
  void record_again();

 private:
  friend struct PipelineInternals;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns the schedule of this kind for the pipeline that the stages are part of: ranks and stages per rank
// follow from the options and the number of stages. Throws ValueError if there are no stages, if their number
// is not a multiple of the ranks, and for a shape that the kind does not support.
schedule::Schedule schedule_for(schedule::ScheduleKind kind, const std::vector<PipelineStage>& stages,
                                int n_microbatches, const PipelineOptions& options);

// A pipeline with the schedule of one kind.
template <schedule::ScheduleKind kind>
class PipelineSchedule : public PipelineRuntime {
 public:
  // [collective over the pipeline] One stage on each rank.
  PipelineSchedule(const PipelineStage& stage, int n_microbatches, PipelineLoss loss, PipelineOptions options)
      : PipelineSchedule(std::vector<PipelineStage>{stage}, n_microbatches, std::move(loss),
                         std::move(options)) {}
  // [collective over the pipeline] Several stages on each rank.
  PipelineSchedule(const std::vector<PipelineStage>& stages, int n_microbatches, PipelineLoss loss,
                   const PipelineOptions& options)
      : PipelineRuntime(stages, schedule_for(kind, stages, n_microbatches, options), std::move(loss),
                        options) {}
};

// All forwards, then all backwards.
using ScheduleGPipe = PipelineSchedule<schedule::ScheduleKind::GPipe>;
// One forward, one backward.
using Schedule1F1B = PipelineSchedule<schedule::ScheduleKind::OneFOneB>;
// 1F1B with several stages per rank.
using ScheduleInterleaved1F1B = PipelineSchedule<schedule::ScheduleKind::Interleaved1F1B>;
// Several stages per rank, breadth first.
using ScheduleLoopedBFS = PipelineSchedule<schedule::ScheduleKind::LoopedBFS>;
// Interleaved, with split backward.
using ScheduleInterleavedZeroBubble = PipelineSchedule<schedule::ScheduleKind::InterleavedZeroBubble>;
// V placement, with split backward.
using ScheduleZBVZeroBubble = PipelineSchedule<schedule::ScheduleKind::ZBVZeroBubble>;
// V placement, with overlapped forward and backward.
using ScheduleDualPipeV = PipelineSchedule<schedule::ScheduleKind::DualPipeV>;
// Split backward; about twice the activation memory of 1F1B.
using ScheduleZB2P = PipelineSchedule<schedule::ScheduleKind::ZB2P>;
// V placement, with split backward; about half the activation memory of 1F1B.
using ScheduleVHalf = PipelineSchedule<schedule::ScheduleKind::VHalf>;
// V placement, with split backward; about a third of the activation memory of 1F1B.
using ScheduleVMin = PipelineSchedule<schedule::ScheduleKind::VMin>;
// Bidirectional: two copies of the model, with overlapped forward and backward.
using ScheduleDualPipe = PipelineSchedule<schedule::ScheduleKind::DualPipe>;

// [collective over the pipeline] Makes a pipeline with the schedule of this name; see
// schedule::schedule_kind. Throws ValueError for an unknown name, and what schedule_for and the constructor
// of PipelineRuntime throw.
PipelineRuntime make_pipeline(std::string_view schedule_name, const std::vector<PipelineStage>& stages,
                              int n_microbatches, PipelineLoss loss, const PipelineOptions& options);

// [collective over the pipeline] Makes a pipeline from the text form of a schedule, compute-only or lowered.
// Throws ConfigError for malformed text, and what the constructor of PipelineRuntime throws.
PipelineRuntime pipeline_from_csv(std::string_view csv, const std::vector<PipelineStage>& stages,
                                  PipelineLoss loss, const PipelineOptions& options);

}  // namespace penstock
