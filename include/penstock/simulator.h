// How long a schedule takes and what it holds: runs its rows side by side under a cost model.
//
// A rank executes its slots in order, each as soon as the rank is free and what the slot needs is there: the
// activation or gradient of the neighbouring stage, the stage's gathered parameters. Both kinds of schedule
// are understood.
//
//   compute-only  transfers are implied: data leaves when it is made and arrives one transfer later
//   lowered       the n-th SEND of a communicator meets its n-th RECV, as in validate.h. Overlapped: both
//                 are only posted, the data moves once both are, and its consumer waits for it. Blocking:
//                 both ranks stand in the transfer.
//
// Time and memory linear in the number of actions. The result depends on the values alone, never on the order
// in which the simulator visits the ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/cost_model.h"
#include "penstock/schedule.h"

namespace penstock::plan {

// Why a slot started when it did: the last thing that it waited for.
struct Cause {
  enum class Kind : std::uint8_t {
    Begin,     // nothing: the step began
    Previous,  // the rank was busy with the slot named
    Data,      // data or parameters; the slot named made them (compute-only) or received or gathered them
               // (lowered)
    Peer,      // a transfer waited for its other side
    Link,      // a transfer or collective waited for the one before it on the same communicator
  };
  Kind kind = Kind::Begin;
  std::int32_t rank = 0;
  std::uint32_t slot = 0;
};

// Idle slots take no time. Transfers and collectives that run beside the computation have the times of the
// transfer.
struct TimedSlot {
  double start = 0;
  double end = 0;
  Cause cause;
};

struct MemoryPoint {
  double time;
  std::int64_t bytes;
  int activations;
};

struct RankSummary {
  double busy = 0;   // computing
  double idle = 0;   // the rest of the step
  double first = 0;  // start of the first and end of the last compute action
  double last = 0;
  int peak_activations = 0;  // (stage, microbatch) pairs in flight; see MemoryLedger
  std::int64_t peak_bytes = 0;
};

// A step of the chain that makes the schedule take as long as it does.
struct CriticalAction {
  int rank;
  std::uint32_t slot;
  double start;
  double end;
  Cause cause;
};

struct Simulation {
  double time = 0;         // from the first start to the last end of anything
  double bubble = 0;       // idle share of ranks x time
  double span_bubble = 0;  // idle share of the ranks' spans, each from its first to its last compute action
  std::vector<RankSummary> ranks;
  std::vector<std::vector<TimedSlot>> slots;           // [rank][slot of the row]
  std::vector<CriticalAction> critical_path;           // in the order of time
  std::vector<std::vector<MemoryPoint>> memory_curve;  // [rank], if asked for

  // Greatest over the ranks.
  int peak_activations() const;
  std::int64_t peak_bytes() const;
};

struct SimulateOptions {
  bool memory_curve = false;
};

// Throws ValueError for a model that does not fit the schedule, and ScheduleError, with what the ranks wait
// for, for rows that cannot run to their end. Expects a schedule that `validate` accepts; work that is
// missing or done twice is timed as it stands.
Simulation simulate(const schedule::Schedule& schedule, const CostModel& model,
                    const SimulateOptions& options = {});

// What a slot waited for, in words: "0F3 on rank 0, ended at 4, arrived at 4.1".
std::string waited_for(const schedule::Schedule& schedule, const Simulation& simulation, const Cause& cause,
                       double start);

}  // namespace penstock::plan
