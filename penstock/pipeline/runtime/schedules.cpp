#include "penstock/pipeline.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/schedule.h"

namespace penstock {

schedule::Schedule schedule_for(schedule::ScheduleKind kind, const std::vector<PipelineStage>& stages,
                                int n_microbatches, const PipelineOptions& options) {
  if (stages.empty())
    throw ValueError(
        describe("stages of a rank", "none", "at least one", "pass the stages of each rank of the pipeline"));
  const int ranks = options.ranks.empty() ? options.world.size() : static_cast<int>(options.ranks.size());
  const int count = stages.front().count();
  if (count % ranks != 0)
    throw ValueError(describe("stages of the pipeline", std::to_string(count),
                              fmt::format("a multiple of its {} ranks", ranks),
                              "cut the model so that every rank has the same number of stages"));
  return schedule::generate(
      kind,
      {.ranks = ranks, .stages_per_rank = count / ranks, .microbatches = n_microbatches, .group_size = {}});
}

PipelineRuntime make_pipeline(std::string_view schedule_name, const std::vector<PipelineStage>& stages,
                              int n_microbatches, PipelineLoss loss, const PipelineOptions& options) {
  return {stages, schedule_for(schedule::schedule_kind(schedule_name), stages, n_microbatches, options),
          std::move(loss), options};
}

PipelineRuntime pipeline_from_csv(std::string_view csv, const std::vector<PipelineStage>& stages,
                                  PipelineLoss loss, const PipelineOptions& options) {
  return {stages, schedule::parse_schedule(csv), std::move(loss), options};
}

}  // namespace penstock
