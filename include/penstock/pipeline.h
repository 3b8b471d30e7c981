// Executes any schedule over the stages of this rank: one loop for all of them.
//
//   PipelineRuntime pipeline({stage}, schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 4, .microbatches = 8}), loss, {world});
//   auto result = pipeline.step(Tree::tuple({x}), {}, y);        // forward and backward of all microbatches; gradients are in .grad()
//   optimizer.step();
//   auto eval = pipeline.eval(Tree::tuple({x}));                 // forward only, in any schedule
//
// Every rank of the pipeline calls step, with the arguments of the first stage where it has one, its keyword arguments, and the target
// where it has the last stage; what a rank does not need may be left out. Arguments are split into microbatches (microbatch.h).
//
// What the loop does about speed: receives are posted ahead, sends are reaped late, ranks wait only for data they need now;
// stages that share a rank hand tensors over without a copy; outputs are freed when sent, graphs after their last backward.
//
// Gradients add to what .grad() holds, so steps accumulate; with scale_grads those of this step are divided by the number of
// microbatches first, whatever was there before. In a bidirectional schedule the two copies of a part end with the same sum.
//
// Errors. Arguments that a rank refuses (ValueError, StateError and the like: no batch, too few rows, no target, keywords that no stage takes, no loss) and ranks that do
// different things (PipeliningMetadataError) are found before anything is sent: the call fails on every rank, elsewhere with a ValueError
// that quotes the cause, and the next one may be right. What goes wrong later on one rank (a module that throws, tensors that do not
// fit, a rank that dies) ends the step on all of them within the deadline: there with the error itself, elsewhere with a PeerLostError that
// quotes it. The pipeline is unusable then.
// A TimeoutError or PeerLostError of a step ends with a report of where every rank is and who holds up whom (stall_report.h); with
// PENSTOCK_STALL_DIR set, it is also in stall-rank<r>.json there.
// Thread rule: one thread; every rank runs its steps in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/world.h"
#include "penstock/microbatch.h"
#include "penstock/pipeline/stage/pipe_info.h"
#include "penstock/pipeline/stage/pipeline_loss.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/stage.h"
#include "penstock/pipeline/runtime/step_result.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/schedule.h"
#include "penstock/step_context.h"

namespace penstock {

struct PipelineOptions {
  comm::World world;
  std::vector<int> ranks = {};   // of the pipeline, in its order; none: all of the world
  bool scale_grads = true;       // divide the gradients of a step by the number of microbatches: for losses that are means
  SplitSpecs split = {};         // of args and kwargs
  Tree target_split = {};
  Tree output_merge = {};        // how results of microbatches become one
  std::vector<SkipTensor> skips = {};
  std::uint64_t seed = 0;        // of StepContext
  double loss_scale = 1.0;
  comm::P2PTransport p2p = comm::P2PTransport::Auto;  // World::low_latency_transport(): UCX between processes of one host
  int post_ahead = 2;            // see ProgramOptions
  std::optional<PipeInfo> info = {};  // of the front end that cut the model; compared with the schedule
  bool return_outputs = true;    // false: StepResult has losses alone, and what the last stage returns is freed with its graph
  std::optional<BatchRows> rows = {};  // of StepContext: which rows of a microbatch these are, where replicas share it
  // Training steps are recorded on the CUDA device that all stages are on and replayed as one launch: for stages so small that the host
  // cannot keep up with the device. Of each kind of arguments (shapes, dtypes, plain values) the first step runs as ever, the second one
  // is recorded. What the host decides stays as it was then: branches, counters, train or eval mode (`record_again` forgets it). Tensors
  // among the arguments must be on the device and require no gradients; .grad() of parameters lies in memory of the recording, which
  // the next step overwrites. ValueError for pipelines over several ranks, sharded stages and `gradients_done`; modules that read
  // values back or use keyed dropout fail in their first steps with what is wrong.
  bool device_graph = false;
  // Called in a training step where the schedule has REDUCE_GRAD: .grad() of the stage's own parameters is complete and divided, except
  // for parameters that another stage of this rank has, too, and for copies in bidirectional schedules. With earlier steps to add to,
  // it is this step's gradient alone. It may start communication that the caller waits for after the step.
  std::function<void(int stage)> gradients_done = {};
};

struct StepReport {
  int peak_live_microbatches = 0;  // (stage, microbatch) pairs whose forward has run and whose backward has not ended
  int trials = 0;                  // trial runs of this rank's stages, since the beginning
  bool is_static = false;
  bool replayed = false;           // by the device, from a recording: what else is here was counted when it was recorded
  int units_on_two_streams = 0;    // overlapped units whose forward and backward ran beside each other, on CUDA
};

class PipelineRuntime {
 public:
  // Collective over the pipeline. `schedule` may be compute-only or lowered. Throws ValueError for stages that are not those which the
  // schedule puts on this rank, and ScheduleError for a schedule that cannot run.
  PipelineRuntime(std::vector<PipelineStage> stages, schedule::Schedule schedule, PipelineLoss loss, PipelineOptions options);
  ~PipelineRuntime();
  PipelineRuntime(PipelineRuntime&&) noexcept;

  // Connects all channels of the pipeline by transfers of one element, so that no step pays for it. Collective over the pipeline. The
  // first step does it by itself where it was not called; again: nothing. Fails as a step does.
  void warm_up();

  // Needs a loss.
  StepResult step(const Tree& args = {}, const Tree& kwargs = {}, const Tree& target = {});
  // Losses where there is a loss and a target.
  StepResult eval(const Tree& args = {}, const Tree& kwargs = {}, const Tree& target = {});

  int n_microbatches() const;
  const schedule::Schedule& schedule() const;  // lowered
  int rank() const;                            // along the pipeline
  std::vector<PipelineStage>& stages();
  // Of the last step.
  StepReport report() const;

  // What all ranks did in the last step, and when. Collective over the pipeline: its first rank gets the trace, the others nothing.
  // Clocks are compared the first time; `align_again` repeats that, for runs so long that they drift. Throws StateError before the
  // first step, after one that failed, and after one that was replayed.
  std::optional<StepTrace> trace_last_step(bool align_again = false);
  // The same, written by the first rank to a file that Perfetto and `penstock trace` read. ConfigError there if that fails.
  void write_trace(const std::string& path);

  // Called behind every instruction of later training steps, on the thread that runs them: for who measures. None: an empty function.
  void set_instruction_observer(std::function<void()> observer);

  void set_loss_scale(double scale);
  // The number that the next training step has in StepContext; later ones count on. 0 at the beginning.
  void set_step(std::int64_t step);
  double loss_scale() const;
  // With PipelineOptions::device_graph: the next step runs as ever, the one after it is recorded.
  void record_again();

 private:
  friend class PipelineTrace;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
