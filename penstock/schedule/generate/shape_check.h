// Shape checks shared by the generators; each throws ValueError naming the schedule.
#pragma once

#include "penstock/generators.h"

namespace penstock::schedule {

// Checks that counts are in range, so that arithmetic on them cannot overflow.
void check_counts(ScheduleKind kind, const PipelineShape& shape);
// Checks the requirements of the kind: stages per rank, microbatches, no group size where it has no meaning.
void check_stages_per_rank(ScheduleKind kind, const PipelineShape& shape, int required, const char* why);
void check_microbatches_at_least(ScheduleKind kind, const PipelineShape& shape, int least, const char* why);
void refuse_group_size(ScheduleKind kind, const PipelineShape& shape);
// The group size in effect for the interleaved kinds.
int checked_group_size(ScheduleKind kind, const PipelineShape& shape);

}  // namespace penstock::schedule
