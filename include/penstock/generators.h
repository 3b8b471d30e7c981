// Every pipeline schedule by name: pure functions from a shape to a compute-only schedule.
//
// A generator throws ValueError for a shape that its schedule does not have; the message says which numbers
// would do. P = ranks, V = stages per rank, M = microbatches. "In flight" counts microbatches whose forward
// ran on a rank and whose weight gradient has not, at most, in units of one rank's share of the model; G is
// the group size.
//
//   kind                   placement      V    backward  M                         in flight at rank r
//   GPipe                  loop           1    B         any                       M
//   1F1B                   loop           1    B         >= P                      P - r
//   Interleaved1F1B        loop           any  B         whole rounds, see below   (2(P-1-r) + (V-1)G + 1) / V
//   LoopedBFS              loop           any  B         any                       M
//   InterleavedZeroBubble  loop           any  I W       whole rounds              ((V-1)G + P) / V
//   ZBVZeroBubble          v              2    I W       any                       P
//   DualPipeV              v              2    B, I W    >= 2P                     P + 1/2
//   ZB2P                   loop           1    I W       any                       2P - 1
//   VHalf                  v              2    I W       any                       P/2 + 1
//   VMin                   v              2    I W       any                       P/3 + 4/3
//   DualPipe               bidirectional  2    B, I W    even, >= 2P (P even)      P + 1, weights twice
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::schedule {

struct PipelineShape {
  int ranks = 1;
  int stages_per_rank = 1;
  int microbatches = 1;
  // Interleaved1F1B and InterleavedZeroBubble: how many microbatches a rank runs on one chunk before it turns
  // to the next. Unset: M / max(1, M / P) in whole numbers, which must divide M. Set: at least P, and the
  // rest M mod G must be 0 or at least P. Any other generator refuses it.
  std::optional<int> group_size;
};

enum class ScheduleKind {
  GPipe,
  OneFOneB,
  Interleaved1F1B,
  LoopedBFS,
  InterleavedZeroBubble,
  ZBVZeroBubble,
  DualPipeV,
  ZB2P,
  VHalf,
  VMin,
  DualPipe,
};

Schedule gpipe(const PipelineShape& shape);
Schedule one_f_one_b(const PipelineShape& shape);
Schedule interleaved_1f1b(const PipelineShape& shape);
Schedule looped_bfs(const PipelineShape& shape);
Schedule interleaved_zero_bubble(const PipelineShape& shape);
Schedule zbv_zero_bubble(const PipelineShape& shape);
Schedule dual_pipe_v(const PipelineShape& shape);
Schedule zb2p(const PipelineShape& shape);
Schedule v_half(const PipelineShape& shape);
Schedule v_min(const PipelineShape& shape);
// Two copies of the model's P parts run in opposite directions; see Chain for how the value says that. Copy 0
// takes microbatches 0..M/2-1, copy 1 takes M/2..M-1; rank r holds stages r and 2P-1-r. The gradients of
// stages s and P+s belong to the same parameters and must be summed by whoever executes this.
Schedule dual_pipe(const PipelineShape& shape);

Schedule generate(ScheduleKind kind, const PipelineShape& shape);

// Throws what `generate` would throw, in constant time.
void check_shape(ScheduleKind kind, const PipelineShape& shape);
StagePlacement placement_of(ScheduleKind kind);
// Stages per rank that the kind demands; none when any number will do.
std::optional<int> required_stages_per_rank(ScheduleKind kind);
// Where nobody says how many: what the kind demands, else 2. On one stage a rank the interleaved kinds would
// be other schedules (Interleaved1F1B would be 1F1B).
int default_stages_per_rank(ScheduleKind kind);

// All kinds in the order of the table above.
const std::vector<ScheduleKind>& all_schedule_kinds();
// The stable name: "1F1B", "Interleaved1F1B", ...
std::string_view to_text(ScheduleKind kind);

// What a name means. Two names stand for a family whose schedules come from a file and have no generator;
// their `kind` is empty.
struct ScheduleName {
  std::string name;                  // canonical spelling
  std::optional<ScheduleKind> kind;  // none for PipelineScheduleSingle and PipelineScheduleMulti
  bool in_reference = false;         // PyTorch 2.14 knows this name too (not ZB2P, ..., not the short names, not with underscores)
};
// Any case, with or without underscores and hyphens between words ("interleaved_1f1b"); also the short names VPP (Interleaved1F1B), ZB1P (InterleavedZeroBubble) and ZBV (ZBVZeroBubble).
// Throws ValueError that lists the names and the nearest one.
ScheduleName resolve_schedule_name(std::string_view name);
// As above; a family is a ValueError.
ScheduleKind schedule_kind(std::string_view name);

}  // namespace penstock::schedule
