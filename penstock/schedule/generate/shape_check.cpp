#include "penstock/schedule/generate/shape_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/schedule/generate/virtual_pipeline.h"

namespace penstock::schedule {

namespace {

constexpr int kMaxRanks = 65536;
constexpr long long kMaxActions = 1LL << 31;

void check_range(ScheduleKind kind, const char* what, long long value, long long low, long long high) {
  if (value < low || value > high) {
    throw ValueError(describe(fmt::format("{}: {}", to_text(kind), what), fmt::format("{}", value),
                              fmt::format("{} to {}", low, high)));
  }
}

}  // namespace

void check_counts(ScheduleKind kind, const PipelineShape& shape) {
  check_range(kind, "ranks", shape.ranks, 1, kMaxRanks);
  check_range(kind, "stages per rank", shape.stages_per_rank, 1, kMaxStage / shape.ranks);
  check_range(kind, "microbatches", shape.microbatches, 1,
              kMaxActions / (static_cast<long long>(shape.ranks) * shape.stages_per_rank));
  check_range(kind, "microbatches", shape.microbatches, 1, kMaxMicrobatch / 8 / shape.stages_per_rank);
}

void check_stages_per_rank(ScheduleKind kind, const PipelineShape& shape, int required, const char* why) {
  if (shape.stages_per_rank == required) return;
  throw ValueError(describe(fmt::format("{}: stages per rank", to_text(kind)),
                            fmt::format("{}", shape.stages_per_rank), fmt::format("{}, {}", required, why),
                            fmt::format("set {} stages in all for {} ranks or choose another schedule",
                                        static_cast<long long>(required) * shape.ranks, shape.ranks)));
}

void check_microbatches_at_least(ScheduleKind kind, const PipelineShape& shape, int least, const char* why) {
  if (shape.microbatches >= least) return;
  throw ValueError(describe(fmt::format("{} over {} ranks: microbatches", to_text(kind), shape.ranks),
                            fmt::format("{}", shape.microbatches), fmt::format("at least {}, {}", least, why),
                            "use more microbatches, fewer ranks, or GPipe"));
}

void refuse_group_size(ScheduleKind kind, const PipelineShape& shape) {
  if (!shape.group_size) return;
  throw ValueError(describe(fmt::format("{}: microbatch group size", to_text(kind)),
                            fmt::format("{}", *shape.group_size), "none, as this schedule has no groups",
                            "leave it out or choose Interleaved1F1B"));
}

int checked_group_size(ScheduleKind kind, const PipelineShape& shape) {
  const int ranks = shape.ranks;
  const int microbatches = shape.microbatches;
  if (!shape.group_size) {
    const int rounds = std::max(1, microbatches / ranks);
    if (microbatches % rounds == 0) return microbatches_per_round(microbatches, ranks);
    throw ValueError(describe(
        fmt::format("{} over {} ranks: microbatches", to_text(kind), ranks), fmt::format("{}", microbatches),
        fmt::format("a multiple of its {} rounds (microbatches / ranks)", rounds),
        fmt::format("use {} or {} microbatches, or set a group size", microbatches - microbatches % ranks,
                    microbatches - microbatches % ranks + ranks)));
  }
  const int group = *shape.group_size;
  // With smaller groups a rank would reach its next chunk before the first microbatch can have arrived there.
  const int least = std::min(ranks, microbatches);
  if (group < least || group > kMaxMicrobatch) {
    throw ValueError(describe(fmt::format("{} over {} ranks: microbatch group size", to_text(kind), ranks),
                              fmt::format("{}", group), fmt::format("at least {}", least)));
  }
  const int rest = group >= microbatches ? 0 : microbatches % group;
  if (rest != 0 && rest < ranks) {
    throw ValueError(describe(fmt::format("{} over {} ranks, groups of {}: microbatches in the last group",
                                          to_text(kind), ranks, group),
                              fmt::format("{}", rest), fmt::format("0 or at least {}", ranks),
                              fmt::format("change the {} microbatches or the group size", microbatches)));
  }
  return std::min(group, microbatches);
}

}  // namespace penstock::schedule
