// Lowers a compute-only schedule to the one that is executed: adds parameter gathering, gradient reduction
// and transfers.
//
//   schedule::Schedule schedule =
//       schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 4, .microbatches = 8});
//   schedule::Schedule lowered = schedule::lower(schedule, {.unshard = false});
//   std::cout << schedule::to_csv(lowered);  // 0F0,0SEND_F0,0F1, and so on
//
// `lower` runs three passes: unshard and reshard, reduce_grad, send and receive. Each is also available as a
// function. Passes drop idle slots. They do not validate their input; a schedule to which transfers cannot be
// added, since ranks wait for each other, is a ScheduleError. Time is linear in the number of actions times
// the number of stages of one rank.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include "penstock/schedule.h"

namespace penstock::schedule {

// Options of `lower`.
struct LowerOptions {
  // Number of stages whose parameters a rank holds gathered at once: those that it uses next. At least 1.
  int max_active_stages = 3;
  // Puts each receive directly before the action that consumes it, not where the receiving rank is when the
  // data is sent. The executor must post sends without waiting (SendModel::Posted).
  bool defer_receives = false;
  // Adds UNSHARD and RESHARD. Set to false for stages whose parameters are not sharded.
  bool unshard = true;
  // Adds REDUCE_GRAD.
  bool reduce_grad = true;
};

// Returns the lowered form of a compute-only schedule. Throws ValueError for an action other than F, B, I and
// W, also as a member of an overlap (a schedule that is lowered, even partly, cannot be lowered again), and
// for max_active_stages below 1; ScheduleError as add_send_receive does.
Schedule lower(const Schedule& schedule, const LowerOptions& options = {});

// Returns whether every action is F, B, I or W.
bool is_compute_only(const Schedule& schedule);

// Adds UNSHARD and RESHARD to a row: before each slot, the stages that are used next are gathered, at most
// `max_active_stages` of them (the members of an overlap may exceed the limit), and all others are freed; at
// the end, all are freed. Throws ValueError for a limit below 1.
Row add_unshard_reshard(const Row& row, int max_active_stages);

// Adds REDUCE_GRAD to a row, after the slot in which a stage's number of weight gradients (B or W) reaches
// `microbatches`.
Row add_reduce_grad(const Row& row, int microbatches);
// The same with the number of microbatches of each stage's chain.
Row add_reduce_grad(const Row& row, const StageMap& stages);

// Replaces each I that is directly followed by the W of the same stage and microbatch by a B. Idle slots do
// not count.
Row merge_backward(const Row& row);

// Adds transfers: a send after the action that produces the data, and a receive where the receiving rank is
// at that moment, or with `defer_receives` directly before its consumer (a receive from a higher rank at the
// latest before the next send to that rank). Adjacent stages on the same rank need no transfer. Throws
// ScheduleError for ranks that wait for each other and for stages or microbatches outside the schedule.
Schedule add_send_receive(const Schedule& schedule, bool defer_receives = false);

}  // namespace penstock::schedule
