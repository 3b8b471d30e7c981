// From a compute-only schedule to the one that is executed: adds parameter gathering, gradient reduction and
// transfers.
//
// Each step is a pass of its own; `lower` runs unshard/reshard, reduce_grad and send/receive in this order.
// Passes drop idle slots. They do not validate; a schedule that cannot be given transfers (ranks that wait
// for each other) is a ScheduleError. Time linear in the number of actions times the stages of one rank.
#pragma once

#include "penstock/schedule.h"

namespace penstock::schedule {

struct LowerOptions {
  // Stages whose parameters a rank holds gathered at once: the ones it will use next.
  int max_active_stages = 3;
  // Put each receive just before the action that consumes it, instead of where the sender sends it. Transfers
  // and computation overlap less strictly; the executor must post sends without waiting (SendModel::Posted).
  bool defer_receives = false;
  // False leaves out UNSHARD and RESHARD, for stages whose parameters are not sharded.
  bool unshard = true;
  bool reduce_grad = true;
};

// Throws ValueError that names the first action which is no computation (a send, a receive, UNSHARD, RESHARD or
// REDUCE_GRAD, also as a member of an overlap): what is lowered, or partly so, cannot be lowered again.
Schedule lower(const Schedule& schedule, const LowerOptions& options = {});

// Whether every action is F, B, I or W.
bool is_compute_only(const Schedule& schedule);

// Before each slot gathers the stages that come next (at most `max_active_stages`; a slot with an overlap may
// exceed it by its own members) and frees the ones that are not among them. Throws ValueError for a limit
// below 1.
Row add_unshard_reshard(const Row& row, int max_active_stages);

// REDUCE_GRAD behind the slot in which a stage's count of weight gradients (B or W) reaches `microbatches`.
Row add_reduce_grad(const Row& row, int microbatches);
// The same with the number of microbatches of each stage's chain.
Row add_reduce_grad(const Row& row, const StageMap& stages);

// I directly followed by the W of the same stage and microbatch becomes B.
Row merge_backward(const Row& row);

// Sends behind the action that produces the data. The matching receive stands where the receiving rank has
// got to at that moment; with `defer_receives` just before its consumer. Stages that share a rank exchange
// nothing.
Schedule add_send_receive(const Schedule& schedule, bool defer_receives = false);

}  // namespace penstock::schedule
