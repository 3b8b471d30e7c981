// Computes how long a schedule takes and how much memory it needs: runs its rows in parallel under a cost
// model.
//
//   schedule::Schedule schedule =
//       schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 4, .microbatches = 8});
//   plan::Simulation simulation = plan::simulate(schedule, plan::CostModel{});
//   std::cout << simulation.time << " " << simulation.bubble << " " << simulation.peak_activations() << "\n";
//
// A rank executes its slots in order, each as soon as the rank is free and the slot's inputs are there: the
// activation or gradient of the adjacent stage, and the stage's gathered parameters. Both kinds of schedule
// are supported:
//
//   compute-only  transfers are implied: data is sent when it is computed and arrives one transfer time later
//   lowered       the n-th SEND of a communicator matches its n-th RECV, as in validate.h. Overlapped: both
//                 are only posted, the data moves once both are, and its consumer waits for it. Blocking:
//                 both ranks wait until the transfer ends
//
// Time and memory are linear in the number of actions. The result depends on schedule and model only, not on
// the order in which the simulator visits the ranks.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/schedule.h"

namespace penstock::plan {

// Why a slot did not start earlier: the last thing that it waited for.
struct Cause {
  // What a slot can wait for.
  enum class Kind : std::uint8_t {
    Begin,     // nothing: it started at the beginning of the step
    Previous,  // the rank was busy with another slot
    Data,      // data or parameters that another slot computed, received or gathered
    Peer,      // a transfer waited for the rank on the other side
    Link,      // a transfer or collective waited for the previous one on the same communicator
  };
  Kind kind = Kind::Begin;  // what the slot waited for
  std::int32_t rank = 0;    // rank of the other slot, unless `kind` is Begin
  std::uint32_t slot = 0;   // index of the other slot in its row, unless `kind` is Begin
};

// When a slot ran. Idle slots take no time. Slots of transfers and collectives that overlap computation have
// the times of the communication.
struct TimedSlot {
  double start = 0;  // when it started
  double end = 0;    // when it ended
  Cause cause;       // why it did not start earlier
};

// What a rank holds from some time on.
struct MemoryPoint {
  double time;         // when the values change
  std::int64_t bytes;  // memory in use
  int activations;     // (stage, microbatch) pairs in flight
};

// Totals of one rank.
struct RankSummary {
  double busy = 0;   // time of computation
  double idle = 0;   // the rest of the step
  double first = 0;  // start of the first compute action
  double last = 0;   // end of the last compute action
  // Greatest number of (stage, microbatch) pairs in flight: F has started, and B or W has not ended.
  int peak_activations = 0;
  // Greatest memory in use, parameters and gradients included.
  std::int64_t peak_bytes = 0;
};

// A slot of the critical path, the chain of slots that determines the time of the step.
struct CriticalAction {
  int rank;            // rank that executes it
  std::uint32_t slot;  // index in the row of the rank
  double start;        // when it started
  double end;          // when it ended
  Cause cause;         // why it did not start earlier
};

// The result of `simulate`.
struct Simulation {
  double time = 0;    // of the whole step, communication included
  double bubble = 0;  // share of (ranks x time) in which ranks do not compute
  // The same share of the ranks' spans, each from its first to its last compute action.
  double span_bubble = 0;
  std::vector<RankSummary> ranks;                      // totals, by rank
  std::vector<std::vector<TimedSlot>> slots;           // times, by [rank][slot of the row]
  std::vector<CriticalAction> critical_path;           // in the order of time
  std::vector<std::vector<MemoryPoint>> memory_curve;  // by rank; empty unless requested

  // Returns the maximum over the ranks.
  int peak_activations() const;
  // Returns the maximum over the ranks.
  std::int64_t peak_bytes() const;
};

// Options of `simulate`.
struct SimulateOptions {
  bool memory_curve = false;  // records Simulation::memory_curve
};

// Simulates one step. The schedule should be one that `validate` accepts; missing or duplicate work is
// simulated as it is. Throws ValueError for a model that CostModel::check rejects; ScheduleError for rows
// that cannot run to their end, for actions on the wrong rank, and for stages or microbatches outside the
// schedule.
Simulation simulate(const schedule::Schedule& schedule, const CostModel& model,
                    const SimulateOptions& options = {});

// Returns a description of what a slot that started at `start` waited for: "0F3 on rank 0, ended at 4,
// arrived at 4.1".
std::string waited_for(const schedule::Schedule& schedule, const Simulation& simulation, const Cause& cause,
                       double start);

}  // namespace penstock::plan
