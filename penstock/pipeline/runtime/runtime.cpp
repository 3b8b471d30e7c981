#include "penstock/pipeline.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <numeric>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/pipeline/backward/copy_gradients.h"
#include "penstock/pipeline/backward/step_gradients.h"
#include "penstock/pipeline/infer/stage_plan.h"
#include "penstock/pipeline/program/executor.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/pipeline/runtime/channel_groups.h"
#include "penstock/pipeline/runtime/channel_warm_up.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/pipeline/runtime/pipe_info.h"
#include "penstock/pipeline/runtime/stage_runner.h"
#include "penstock/pipeline/runtime/stall_error.h"
#include "penstock/pipeline/runtime/step_actions.h"
#include "penstock/pipeline/runtime/step_recording.h"
#include "penstock/pipeline/runtime/step_watch.h"
#include "penstock/pipeline/runtime/trace_collection.h"
#include "penstock/pipeline/stage/cut_arguments.h"
#include "penstock/pipeline/stage/gradient_sync.h"
#include "penstock/pipeline/stage/sharded_modules.h"

namespace penstock {

namespace {

std::vector<int> pipeline_ranks(const PipelineOptions& options) {
  if (!options.ranks.empty()) return options.ranks;
  std::vector<int> all(static_cast<std::size_t>(options.world.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

int position_in(const std::vector<int>& ranks, int rank) {
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end())
    throw ValueError(
        describe("ranks of the pipeline", fmt::format("[{}] on rank {}", format_list(ranks), rank),
                 "a list that contains this rank", "create each pipeline only on its own ranks"));
  return static_cast<int>(at - ranks.begin());
}

std::vector<SkipConnection> connections(const std::vector<SkipTensor>& skips) {
  std::vector<SkipConnection> found;
  for (const SkipTensor& skip : skips) found.push_back({skip.from, skip.to});
  return found;
}

// Sorts the stages and checks that they are exactly those that the schedule has on this rank.
std::vector<PipelineStage> checked_stages(std::vector<PipelineStage> stages, const schedule::StageMap& map,
                                          int rank) {
  std::sort(stages.begin(), stages.end(),
            [](const PipelineStage& a, const PipelineStage& b) { return a.index() < b.index(); });
  std::vector<int> given;
  for (const PipelineStage& stage : stages) {
    given.push_back(stage.index());
    if (stage.count() != map.stages())
      throw ValueError(describe(fmt::format("number of stages of the pipeline, at stage {}", stage.index()),
                                std::to_string(stage.count()),
                                fmt::format("{}, as in the schedule", map.stages()),
                                "make stages and schedule for the same pipeline"));
  }
  if (const std::vector<int> expected = map.stages_of(rank); given != expected)
    throw ValueError(describe(fmt::format("stages on rank {} of the pipeline", rank),
                              fmt::format("[{}]", format_list(given)),
                              fmt::format("[{}]", format_list(expected)),
                              "pass to every rank the stages that the schedule places there"));
  return stages;
}

bool has_overlaps(const Program& program) {
  return std::any_of(program.instructions.begin(), program.instructions.end(),
                     [](const auto& each) { return each.members > 1; });
}

// Returns the microbatch whose weight gradients the stage computes last. Some are computed by I, others by W:
// modules that reduce their own (gradient_sync.h) need a microbatch that comes last in both.
std::optional<int> last_backward(const Program& program, const PipelineStage& stage) {
  using schedule::ActionKind;
  std::optional<int> last, last_of_inputs;
  for (const auto& each : program.instructions) {
    if (each.kind != Instruction::Kind::Compute || each.action.stage() != stage.index()) continue;
    const ActionKind kind = each.action.kind();
    if (kind == ActionKind::Backward || kind == ActionKind::BackwardWeight) last = *each.action.microbatch();
    if (kind == ActionKind::Backward || kind == ActionKind::BackwardInput)
      last_of_inputs = *each.action.microbatch();
  }
  if (last != last_of_inputs && !gradient_syncs_of(stage.module()).empty())
    throw ValueError(describe(
        fmt::format("backwards of stage {}, whose modules reduce their own gradients", stage.index()),
        fmt::format("the last B or I of microbatch {}, the last B or W of microbatch {}", *last_of_inputs,
                    *last),
        "both of one microbatch",
        fmt::format("move the B or W of microbatch {} after those of all others", *last_of_inputs)));
  return last;
}

bool any_sharded(const std::vector<PipelineStage>& stages) {
  return std::any_of(stages.begin(), stages.end(),
                     [](const PipelineStage& stage) { return ShardedModules(stage.module()).any(); });
}

schedule::Schedule fitting(schedule::Schedule schedule, std::size_t ranks,
                           const std::optional<PipeInfo>& info, bool has_loss, bool unshard) {
  if (schedule.ranks() != static_cast<int>(ranks))
    throw ValueError(describe("ranks of the schedule", std::to_string(schedule.ranks()),
                              fmt::format("{}, as in the pipeline", ranks),
                              "generate it for the ranks of this pipeline"));
  if (info) check_pipe_info(*info, schedule, has_loss);
  return executable(std::move(schedule), unshard);
}

Tree step_arguments(const Tree& args) {
  if (args.is_none()) return Tree::tuple({});
  return args.is_leaf() || args.kind() == Tree::Kind::Dict ? Tree::tuple({args}) : args;
}

}  // namespace

struct PipelineRuntime::Impl {
  Impl(std::vector<PipelineStage> given, schedule::Schedule wanted, PipelineLoss the_loss,
       PipelineOptions the_options)
      : options(std::move(the_options)),
        ranks(pipeline_ranks(options)),
        own(position_in(ranks, options.world.rank())),
        lowered(fitting(std::move(wanted), ranks.size(), options.info, static_cast<bool>(the_loss),
                        any_sharded(given))),
        stages(checked_stages(std::move(given), lowered.stages(), own)),
        loss(std::move(the_loss)),
        training(compile_program(lowered, own, connections(options.skips),
                                 {.has_backward = true, .post_ahead = options.post_ahead})),
        evaluation(compile_program(forward_only(lowered), own, connections(options.skips),
                                   {.has_backward = false, .post_ahead = options.post_ahead})),
        groups(options.world, ranks, lowered.stages(), connections(options.skips), options.p2p),
        planner(stages, lowered.stages(), options.skips, loss, groups.control(), ranks, own),
        runners(make_runners()),
        actions(runners, groups, options.skips,
                {.any = has_overlaps(training), .overlap_exchanges = options.overlap_exchanges},
                options.borders),
        copies(options.world, ranks, lowered.stages(), stages) {
    if (options.device_graph) record_steps();
  }

  void record_steps() {
    const auto refuse = [](const char* what, const std::string& actual, const char* expected) {
      throw ValueError(describe(what, actual, expected, "turn PipelineOptions::device_graph off"));
    };
    if (ranks.size() > 1)
      refuse("ranks of a pipeline whose steps are recorded", std::to_string(ranks.size()),
             "1: what others send cannot be recorded");
    if (any_sharded(stages))
      refuse("stages of a pipeline whose steps are recorded", "sharded stages", "unsharded parameters");
    if (options.gradients_done)
      refuse("gradients_done of a pipeline whose steps are recorded", "set",
             "none: the host runs no code during a replay");
    recording = std::make_unique<StepRecording>(
        stages, [this](const Tree& args, const Tree& kwargs, const Tree& target) {
          return run(true, args, kwargs, target);
        });
  }

  StepResult train(const Tree& args, const Tree& kwargs, const Tree& target) {
    if (!recording) return run(true, args, kwargs, target);
    check_usable();
    const std::int64_t number = steps_done;
    StepResult result = recording->step(args, kwargs, target, options.loss_scale);
    last.replayed = recording->last_was_replayed();
    steps_done = number + 1;  // making the recording does not count as a step
    return result;
  }

  std::vector<StageRunner> make_runners() const {
    std::vector<StageRunner> made;
    const bool by_blocks = has_overlaps(training);
    for (const PipelineStage& stage : stages)
      made.emplace_back(stage, lowered.stages().is_first(stage.index()),
                        lowered.stages().is_last(stage.index()), loss, by_blocks,
                        last_backward(training, stage));
    for (StageRunner& runner : made) runner.set_keeps_results(options.return_outputs);
    return made;
  }

  bool holds(bool (schedule::StageMap::*end)(int) const) const {
    return std::any_of(stages.begin(), stages.end(),
                       [&](const PipelineStage& stage) { return (lowered.stages().*end)(stage.index()); });
  }

  StepDescription describe_step(bool has_backward, const Tree& args, const Tree& kwargs,
                                const Tree& target) const {
    StepDescription step;
    step.has_backward = has_backward;
    const int wanted = lowered.microbatches();
    const bool first = holds(&schedule::StageMap::is_first);
    const bool last = holds(&schedule::StageMap::is_last);
    if (has_backward && !loss)
      throw StateError(describe("a training step", "the pipeline has no loss", "a loss to run backward from",
                                "pass a loss to the schedule, or call eval"));
    if (first && step_arguments(args).size() == 0 && kwargs.size() == 0)
      throw ValueError(describe("arguments of a step on the rank of the first stage", "none",
                                "those of the first stage", "pass the batch on this rank"));
    Microbatches parts = split_microbatches(first ? step_arguments(args) : Tree::tuple({}), kwargs, wanted,
                                            first ? options.split : SplitSpecs{{}, options.split.kwargs});
    check_count(parts.count(), "arguments");
    for (const PipelineStage& stage : stages)
      if (kwargs.size() > 0 && !stage.module().takes_kwargs())
        throw ValueError(describe(fmt::format("keyword arguments of a step, for stage {}", stage.index()),
                                  fmt::format("'{}'", fmt::join(kwargs.keys(), "', '")),
                                  "none, because its forward takes none",
                                  "add to forward a last parameter `const penstock::Tree& kwargs`, or pass "
                                  "them only on ranks whose stages take them"));
    step.args = std::move(parts.args);
    step.kwargs = std::move(parts.kwargs);
    if (last && loss && has_backward && target.is_none())
      throw ValueError(describe("target of a step on the rank of the last stage", "none",
                                "what the loss compares the output with", "pass the target on this rank"));
    if (last && !target.is_none()) {
      step.targets = split_tree(target, wanted, options.target_split);
      check_count(step.targets.size(), "target");
    } else {
      step.targets.resize(static_cast<std::size_t>(wanted));
    }
    return step;
  }

  void check_count(std::size_t count, const char* what) const {
    if (count != static_cast<std::size_t>(lowered.microbatches()))
      throw ValueError(
          describe(fmt::format("microbatches that the {} of a step make", what), std::to_string(count),
                   fmt::format("{}, as in the schedule", lowered.microbatches()),
                   "pass a batch of at least as many rows, or make a schedule for fewer microbatches"));
  }

  StepResult run(bool has_backward, const Tree& args, const Tree& kwargs, const Tree& target) {
    check_usable();
    running = has_backward ? &training : &evaluation;
    progress.begin_step();
    return guarded([&] {
      // What this rank can check alone comes before any communication, and is then reported to the others:
      // nothing has been sent, so the step ends on all ranks and the pipeline stays usable.
      CutArguments cuts;
      StepDescription step;
      try {
        step = describe_step(has_backward, has_backward ? cuts.cut(args, "arguments") : args,
                             has_backward ? cuts.cut(kwargs, "keyword arguments") : kwargs, target);
      } catch (...) {
        step.has_backward = has_backward;
        step.refusal = std::current_exception();
      }
      connect();
      const auto plans = planner.agree(step);
      StepContext context;
      context.seed = options.seed;
      context.step = has_backward ? steps_done : 0;
      context.recorded = has_backward && recording;
      context.microbatches = lowered.microbatches();
      context.loss_scale = options.loss_scale;
      context.rows = options.rows;
      StepGradients gradients(has_backward ? stages : std::vector<PipelineStage>(),
                              options.scale_grads ? lowered.microbatches() : 1,
                              copies.any() || static_cast<bool>(options.gradients_done));
      actions.begin(step, plans, context, [&](int stage) {
        gradients.divide_stage(stage);
        if (options.gradients_done) tell_gradients_done(stage);
      });
      execute(has_backward ? training : evaluation, actions, progress, &times,
              has_backward ? observer : std::function<void()>());
      if (has_backward) {
        gradients.divide_all();
        copies.sum();
        gradients.add_earlier();
        cuts.add_leaf_gradients();
        ++steps_done;
      }
      StepResult result = collect();
      last.peak_live_microbatches = actions.peak_live();
      last.trials = planner.trials();
      last.is_static = planner.is_static();
      last.replayed = false;
      last.units_on_two_streams = actions.units_on_two_streams();
      last.overlapped_exchanges = actions.overlapped_exchanges();
      actions.clear();
      return result;
    });
  }

  void tell_gradients_done(int stage) const {
    try {
      options.gradients_done(stage);
    } catch (const CommError&) {
      throw;
    } catch (...) {
      std::throw_with_nested(StageBackwardError(
          fmt::format("stage {}: gradients_done failed: {}", stage, current_exception_text())));
    }
  }

  void warm_up() {
    check_usable();
    guarded([&] {
      connect();
      return StepResult{};
    });
  }

  void check_usable() const {
    if (!failure.empty())
      throw StateError(describe("a step of a pipeline", "an earlier one failed: " + failure,
                                "a pipeline without a failed step",
                                "build the pipeline again, or restart from a checkpoint"));
  }

  void connect() {
    if (connected) return;
    warm_up_channels(groups, training, lowered.stages(), connections(options.skips), stages);
    copies.warm_up();
    connected = true;
  }

  // Runs a step or a part of one under the watch; if it fails, the pipeline is unusable on all ranks.
  template <class Body>
  StepResult guarded(const Body& body) {
    watch_steps();
    try {
      progress.enter(StepProgress::kAgreeing, steady_now_ns());
      StepResult result = body();
      progress.enter(StepProgress::kNone, steady_now_ns());
      return result;
    } catch (const StepRefusal& refusal) {
      times.clear();
      progress.enter(StepProgress::kNone, steady_now_ns());
      std::rethrow_exception(refusal.error);
    } catch (const TimeoutError& error) {
      const RankPlace where = place();
      give_up(error.what());
      throw_with_report(error, where, watch.get());
    } catch (const PeerLostError& error) {
      const RankPlace where = place();
      give_up(error.what());
      throw_with_report(error, where, watch.get());
    } catch (const std::exception& error) {
      const RankPlace where = place();
      give_up(without_backtrace(error.what()));
      post_last_status(error, where, watch.get());
      throw;
    } catch (...) {
      give_up(current_exception_text());
      throw;
    }
  }

  void give_up(const std::string& why) {
    failure = why;
    options.world.fail(why);
    actions.clear();
  }

  RankPlace place() const { return place_of(progress.read(), *running.load(), ranks, steady_now_ns()); }

  void watch_steps() {
    if (ranks.size() == 1) return;
    if (!watch) {
      const auto look = [this]() -> std::optional<RankPlace> {
        const auto before = progress.read();
        const RankPlace found = place();
        const auto after = progress.read();
        if (before.step != after.step || before.instruction != after.instruction) return std::nullopt;
        return found;
      };
      watch = std::make_unique<StepWatch>(
          StepWatch::Options{options.world, ranks, groups.control().timeout(), look});
    }
    watch->start();
  }

  std::optional<StepTrace> trace(bool align_again) {
    if (last.replayed)
      throw StateError(describe("trace of the last step", "it was replayed by the device",
                                "a step that the host ran",
                                "call record_again before it, or turn PipelineOptions::device_graph off"));
    if (!failure.empty() || times.empty())
      throw StateError(describe(
          "trace of the last step",
          failure.empty() ? "no step has run, or the last one did not begin" : "it failed: " + failure,
          "a completed step", "run a step first"));
    if (!clock || align_again) clock = align_clock(groups.control());
    const bool trained = running == &training;
    return collect_trace(groups.control(),
                         {.lowered = trained ? lowered : forward_only(lowered),
                          .skips = connections(options.skips),
                          .compile = {.has_backward = trained, .post_ahead = options.post_ahead},
                          .step = progress.read().step,
                          .times = times,
                          .clock = *clock});
  }

  StepResult collect() const {
    StepResult result;
    if (!holds(&schedule::StageMap::is_last)) return result;
    std::vector<Tree> outputs;
    for (int m = 0; m < lowered.microbatches(); ++m)
      for (const StageRunner& runner : runners) {
        const int stage = runner.stage().index();
        if (!lowered.stages().is_last(stage) || !lowered.stages().runs(stage, m)) continue;
        if (options.return_outputs) outputs.push_back(runner.result(m));
        if (runner.loss(m).defined()) result.losses.push_back(runner.loss(m));
      }
    if (options.return_outputs) result.output = merge_microbatches(outputs, options.output_merge);
    return result;
  }

  PipelineOptions options;
  std::vector<int> ranks;
  int own;
  schedule::Schedule lowered;
  std::vector<PipelineStage> stages;
  PipelineLoss loss;
  Program training;
  Program evaluation;
  ChannelGroups groups;
  StagePlanner planner;
  std::vector<StageRunner> runners;
  TorchStepActions actions;
  CopyGradients copies;
  StepProgress progress;
  std::vector<TimedInstruction> times;
  std::int64_t steps_done = 0;
  bool connected = false;
  std::string failure;
  StepReport last;
  std::unique_ptr<StepRecording> recording;  // only with device_graph
  std::function<void()> observer;
  std::atomic<const Program*> running = &training;  // the program of the current or the last step
  std::optional<ClockOffset> clock;
  std::unique_ptr<StepWatch> watch;  // destroyed first: it reads the members above
};

PipelineRuntime::PipelineRuntime(std::vector<PipelineStage> stages, schedule::Schedule schedule,
                                 PipelineLoss loss, PipelineOptions options)
    : impl_(std::make_unique<Impl>(std::move(stages), std::move(schedule), std::move(loss),
                                   std::move(options))) {}
PipelineRuntime::~PipelineRuntime() = default;
PipelineRuntime::PipelineRuntime(PipelineRuntime&&) noexcept = default;

void PipelineRuntime::warm_up() { impl_->warm_up(); }

StepResult PipelineRuntime::step(const Tree& args, const Tree& kwargs, const Tree& target) {
  return impl_->train(args, kwargs, target);
}

StepResult PipelineRuntime::eval(const Tree& args, const Tree& kwargs, const Tree& target) {
  return impl_->run(false, args, kwargs, target);
}

int PipelineRuntime::n_microbatches() const { return impl_->lowered.microbatches(); }
const schedule::Schedule& PipelineRuntime::schedule() const { return impl_->lowered; }
int PipelineRuntime::rank() const { return impl_->own; }
std::vector<PipelineStage>& PipelineRuntime::stages() { return impl_->stages; }
StepReport PipelineRuntime::report() const {
  StepReport report = impl_->last;
  report.border = impl_->actions.border_report();
  return report;
}
void PipelineRuntime::write_trace(const std::string& path) {
  if (const auto trace = impl_->trace(false)) penstock::write_trace(*trace, path);
}
void PipelineRuntime::set_instruction_observer(std::function<void()> observer) {
  impl_->observer = std::move(observer);
}
void PipelineRuntime::set_loss_scale(double scale) { impl_->options.loss_scale = scale; }
void PipelineRuntime::set_step(std::int64_t step) { impl_->steps_done = step; }
double PipelineRuntime::loss_scale() const { return impl_->options.loss_scale; }
void PipelineRuntime::record_again() {
  if (impl_->recording) impl_->recording->forget();
}

struct PipelineInternals {
  static std::optional<StepTrace> trace(PipelineRuntime& pipeline, bool align_again) {
    return pipeline.impl_->trace(align_again);
  }
};

std::optional<StepTrace> trace_last_step(PipelineRuntime& pipeline, bool align_again) {
  return PipelineInternals::trace(pipeline, align_again);
}

}  // namespace penstock
