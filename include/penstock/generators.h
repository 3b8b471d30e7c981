// Every pipeline schedule by name: pure functions from a shape to a compute-only schedule.
//
//   schedule::Schedule schedule =
//       schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 4, .microbatches = 8});
//   schedule::ScheduleKind kind = schedule::schedule_kind("zbv");  // ScheduleKind::ZBVZeroBubble
//   schedule::check_shape(kind, {.ranks = 4, .stages_per_rank = 2, .microbatches = 8});
//
// A generator throws ValueError for a shape that its schedule does not support; the message says which
// numbers would be valid. In the table, P = ranks, V = stages per rank, M = microbatches, G = group size. "In
// flight" is the maximum number of microbatches whose forward has run on a rank and whose weight gradient has
// not, in units of one rank's share of the model.
//
//   kind                   placement      V    backward  M                       in flight at rank r
//   GPipe                  loop           1    B         any                     M
//   1F1B                   loop           1    B         >= P                    P - r
//   Interleaved1F1B        loop           any  B         whole rounds            (2(P-1-r) + (V-1)G + 1) / V
//   LoopedBFS              loop           any  B         any                     M
//   InterleavedZeroBubble  loop           any  I W       whole rounds            ((V-1)G + P) / V
//   ZBVZeroBubble          v              2    I W       any                     P
//   DualPipeV              v              2    B, I W    >= 2P                   P + 1/2
//   ZB2P                   loop           1    I W       any                     2P - 1
//   VHalf                  v              2    I W       any                     P/2 + 1
//   VMin                   v              2    I W       any                     P/3 + 4/3
//   DualPipe               bidirectional  2    B, I W    even, >= 2P (P even)    P + 1, weights twice
//
// "Whole rounds" is the condition of PipelineShape::group_size.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::schedule {

// The size of a pipeline.
struct PipelineShape {
  int ranks = 1;            // P, at least 1
  int stages_per_rank = 1;  // V, at least 1
  int microbatches = 1;     // M, at least 1
  // G, for Interleaved1F1B and InterleavedZeroBubble only: how many microbatches a rank runs on one of its
  // stages before it switches to the next. Unset: M / R, where R = max(1, M / P) in integer division must
  // divide M. Set: at least min(P, M); if G is below M, M mod G must be 0 or at least P. All other kinds
  // throw ValueError if it is set.
  std::optional<int> group_size;
};

// The schedules that have a generator; the table above compares them.
enum class ScheduleKind {
  GPipe,                  // all forwards, then all backwards
  OneFOneB,               // 1F1B: one forward, one backward in turn
  Interleaved1F1B,        // 1F1B over several stages per rank
  LoopedBFS,              // each stage runs all microbatches before the rank's next one
  InterleavedZeroBubble,  // Interleaved1F1B with a split backward; with one stage per rank, ZB1P
  ZBVZeroBubble,          // V placement, split backward, no idle time at equal costs
  DualPipeV,              // DualPipe folded into a V: forwards overlap backwards
  ZB2P,                   // one stage per rank, no idle time at twice the memory of 1F1B
  VHalf,                  // about half of the activation memory of 1F1B
  VMin,                   // about a third of the activation memory of 1F1B
  DualPipe,               // two copies of the model in opposite directions
};

// Returns a GPipe schedule. Throws ValueError for a shape that the kind does not support, as all generators
// do.
Schedule gpipe(const PipelineShape& shape);
// Returns a 1F1B schedule.
Schedule one_f_one_b(const PipelineShape& shape);
// Returns an Interleaved1F1B schedule.
Schedule interleaved_1f1b(const PipelineShape& shape);
// Returns a LoopedBFS schedule.
Schedule looped_bfs(const PipelineShape& shape);
// Returns an InterleavedZeroBubble schedule.
Schedule interleaved_zero_bubble(const PipelineShape& shape);
// Returns a ZBVZeroBubble schedule.
Schedule zbv_zero_bubble(const PipelineShape& shape);
// Returns a DualPipeV schedule.
Schedule dual_pipe_v(const PipelineShape& shape);
// Returns a ZB2P schedule.
Schedule zb2p(const PipelineShape& shape);
// Returns a VHalf schedule.
Schedule v_half(const PipelineShape& shape);
// Returns a VMin schedule.
Schedule v_min(const PipelineShape& shape);
// Returns a DualPipe schedule: two copies of the model's P parts run in opposite directions, each as a chain
// (see Chain). Copy 0 runs microbatches 0 to M/2-1, copy 1 runs M/2 to M-1; rank r holds stages r and 2P-1-r.
// Stages s and P+s have the same parameters; whoever executes the schedule must sum their gradients.
Schedule dual_pipe(const PipelineShape& shape);

// Returns the schedule of a kind. Throws ValueError for a shape that the kind does not support.
Schedule generate(ScheduleKind kind, const PipelineShape& shape);

// Throws the ValueError that `generate` would throw, if any. Takes constant time.
void check_shape(ScheduleKind kind, const PipelineShape& shape);
// Returns the placement of a kind.
StagePlacement placement_of(ScheduleKind kind);
// Returns the number of stages per rank that a kind requires, or std::nullopt if any number is allowed.
std::optional<int> required_stages_per_rank(ScheduleKind kind);
// Returns the number of stages per rank to use if the user gives none: the required one, else 2. With one
// stage per rank the interleaved kinds would be other schedules; Interleaved1F1B would be 1F1B.
int default_stages_per_rank(ScheduleKind kind);

// All kinds in the order of the table above.
const std::vector<ScheduleKind>& all_schedule_kinds();
// Returns the stable name of a kind: "1F1B", "Interleaved1F1B", ...
std::string_view to_text(ScheduleKind kind);

// What a schedule name refers to. PipelineScheduleSingle and PipelineScheduleMulti are families whose
// schedules come from a file; they have no generator.
struct ScheduleName {
  std::string name;                  // canonical spelling
  std::optional<ScheduleKind> kind;  // std::nullopt for the two families
  bool in_reference = false;         // whether PyTorch 2.14 accepts the given spelling, in any case
};
// Looks up a schedule name: in any case, with or without underscores and hyphens ("interleaved_1f1b"); also
// the short names VPP (Interleaved1F1B), ZB1P (InterleavedZeroBubble) and ZBV (ZBVZeroBubble). Throws
// ValueError for an unknown name; the message lists the names and suggests the nearest.
ScheduleName resolve_schedule_name(std::string_view name);
// Returns the kind of a name. Throws ValueError for an unknown name and for the two families.
ScheduleKind schedule_kind(std::string_view name);

}  // namespace penstock::schedule
