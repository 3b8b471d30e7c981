// What an action costs, in time and in memory. The one definition: the simulator, `auto`, the drawings and
// the comparison read it from here.
//
// Time has no unit of its own; whoever fills in the numbers chooses one (milliseconds, or "one forward = 1")
// and reads results in the same. Memory is in bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::plan {

// Longer times are refused: sums over any schedule stay finite.
inline constexpr double kLongestTime = 1e100;

// Time of one action of a stage, for one microbatch.
struct StageCost {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  // A full backward where it differs from the sum of its halves.
  std::optional<double> backward = std::nullopt;
  // The activation handed to the next stage; the gradient that comes back over the same border has the same
  // size.
  double output_bytes = 0;
  // Of the stage as a whole, in schedules that say when parameters are gathered and gradients reduced.
  double unshard = 0;
  double reduce_grad = 0;
};

// What a stage keeps in the memory of its rank.
struct StageMemory {
  std::int64_t parameters = 0;  // from the beginning to the end
  std::int64_t unsharded = 0;   // on top of it between UNSHARD and RESHARD
  std::int64_t gradients = 0;   // from the stage's first weight gradient to the end
  // Per microbatch, from the start of F to the end of B or I.
  std::int64_t activation = 0;
  // Per microbatch, from I to the end of W: what the weight gradient still needs. Unset: as much as
  // `activation`, that is I frees nothing.
  std::optional<std::int64_t> between_input_and_weight = std::nullopt;
};

enum class Communication {
  // Transfers and collectives run beside the computation; a rank waits only for data that it needs and has
  // not got.
  Overlapped,
  // A rank stands still in every transfer: in a lowered schedule both sides until it is over, in a
  // compute-only one the
  // sender.
  Blocking,
};

struct CostModel {
  // One entry per stage, or a single one that holds for all.
  std::vector<StageCost> stages = {StageCost{}};
  std::vector<StageMemory> memory = {StageMemory{}};
  // A transfer between two ranks takes latency + output_bytes / bandwidth. Transfers on one communicator (a
  // direction between two ranks) share its bandwidth one after the other; their latencies overlap.
  double latency = 0;
  double bandwidth = std::numeric_limits<double>::infinity();  // bytes per unit of time
  Communication communication = Communication::Overlapped;
  // How much of the shorter members of an overlapped slot, such as (0F4;3B1)OVERLAP_F_B, is hidden behind the
  // longest one. 0: they take the sum of their times; 1: the longest time.
  double overlap_saving = 0;

  const StageCost& cost_of(int stage) const {
    return stages[stages.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  }
  const StageMemory& memory_of(int stage) const {
    return memory[memory.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  }
  // F, B, I, W, UNSHARD and REDUCE_GRAD; 0 for the others, whose time depends on both sides.
  double time_of(schedule::ActionKind kind, int stage) const;
  // Members of one slot that are executed together.
  double time_of(schedule::Slot slot) const;
  // How long a transfer over the border behind `stage` occupies the communicator.
  double occupancy(int stage) const { return cost_of(stage).output_bytes / bandwidth; }
  double transfer_time(int stage) const { return latency + occupancy(stage); }

  // Throws ValueError for a number of entries other than 1 and `stages`, a time that is negative or above
  // kLongestTime, a bandwidth that is not positive, a saving outside [0, 1], or negative bytes.
  void check(int stages) const;
  // The same, and that the bytes of a rank stay below 2^63 whatever its schedule does.
  void check(const schedule::StageMap& stages, int microbatches) const;
};

// The model of a pipeline cut `parts` times finer: each of the stages costs, keeps and gathers 1/parts. What
// crosses a border stays the same.
CostModel split_evenly(const CostModel& model, int parts);

// How much a rank may hold at once. Empty: no limit.
struct MemoryLimit {
  std::optional<int> activations;     // microbatches in flight
  std::optional<std::int64_t> bytes;  // activations in bytes
};

}  // namespace penstock::plan
