// Pipeline schedules under their common names: thin wrappers of the one runtime (runtime.h).
//
//   Schedule1F1B schedule(stage, 8, loss, {world});
//   auto result = schedule.step(Tree::tuple({x}), {}, y);
//
//   ScheduleInterleaved1F1B interleaved({stage, later_stage}, 8, loss, {world});        // several stages on each rank
//   auto any = make_pipeline("ZBVZeroBubble", {first, last}, 8, loss, {world});
//   auto own = pipeline_from_csv(text, {stage}, loss, {world});                         // a schedule of your own, compute-only or lowered
//
// The stages given are those of this rank; the number of ranks and of stages per rank follows from the
// options and the number of stages.
#pragma once

#include <string_view>
#include <vector>

#include "penstock/pipeline.h"
#include "penstock/generators.h"

namespace penstock {

// Returns the schedule of this kind for the pipeline that these stages are part of. Throws ValueError for
// shapes that the kind does not support.
schedule::Schedule schedule_for(schedule::ScheduleKind kind, const std::vector<PipelineStage>& stages, int n_microbatches, const PipelineOptions& options);

template <schedule::ScheduleKind kind>
class PipelineSchedule : public PipelineRuntime {
 public:
  PipelineSchedule(const PipelineStage& stage, int n_microbatches, PipelineLoss loss, PipelineOptions options)
      : PipelineSchedule(std::vector<PipelineStage>{stage}, n_microbatches, std::move(loss), std::move(options)) {}
  PipelineSchedule(const std::vector<PipelineStage>& stages, int n_microbatches, PipelineLoss loss, const PipelineOptions& options)
      : PipelineRuntime(stages, schedule_for(kind, stages, n_microbatches, options), std::move(loss), options) {}
};

using ScheduleGPipe = PipelineSchedule<schedule::ScheduleKind::GPipe>;
using Schedule1F1B = PipelineSchedule<schedule::ScheduleKind::OneFOneB>;
using ScheduleInterleaved1F1B = PipelineSchedule<schedule::ScheduleKind::Interleaved1F1B>;
using ScheduleLoopedBFS = PipelineSchedule<schedule::ScheduleKind::LoopedBFS>;
using ScheduleInterleavedZeroBubble = PipelineSchedule<schedule::ScheduleKind::InterleavedZeroBubble>;
using ScheduleZBVZeroBubble = PipelineSchedule<schedule::ScheduleKind::ZBVZeroBubble>;
using ScheduleDualPipeV = PipelineSchedule<schedule::ScheduleKind::DualPipeV>;
using ScheduleZB2P = PipelineSchedule<schedule::ScheduleKind::ZB2P>;
using ScheduleVHalf = PipelineSchedule<schedule::ScheduleKind::VHalf>;
using ScheduleVMin = PipelineSchedule<schedule::ScheduleKind::VMin>;
using ScheduleDualPipe = PipelineSchedule<schedule::ScheduleKind::DualPipe>;

// By name, case-insensitive; see resolve_schedule_name.
PipelineRuntime make_pipeline(std::string_view schedule_name, const std::vector<PipelineStage>& stages, int n_microbatches, PipelineLoss loss, const PipelineOptions& options);
// From the text form of a schedule. Throws ConfigError for malformed text.
PipelineRuntime pipeline_from_csv(std::string_view csv, const std::vector<PipelineStage>& stages, PipelineLoss loss, const PipelineOptions& options);

}  // namespace penstock
