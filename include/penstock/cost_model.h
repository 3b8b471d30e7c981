// What actions cost, in time and memory. The simulator, auto_schedule, the drawings and `penstock compare`
// all use this model.
//
//   plan::CostModel model;
//   model.stages = {{.forward = 1, .backward_input = 1, .backward_weight = 0.8, .output_bytes = 8e6}};
//   model.memory = {{.parameters = 1'000'000, .activation = 250'000}};
//   model.latency = 0.01;
//   model.bandwidth = 25e6;
//   model.check(4);  // of a pipeline with 4 stages
//
// Time has no fixed unit: choose one for all inputs (milliseconds, or "one forward = 1"); results are in the
// same unit. Memory is in bytes.
//
// Thread safety: values; concurrent reads are safe.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::plan {

// Greatest time that a model may have, so that sums over any schedule stay finite.
inline constexpr double kLongestTime = 1e100;

// Times and sizes of the actions of one stage.
struct StageCost {
  double forward = 1;          // F of one microbatch
  double backward_input = 1;   // I of one microbatch
  double backward_weight = 1;  // W of one microbatch
  // B of one microbatch. Unset: backward_input + backward_weight.
  std::optional<double> backward = std::nullopt;
  // Bytes of the activation of one microbatch sent to the next stage; the gradient that comes back has the
  // same size.
  double output_bytes = 0;
  double unshard = 0;      // UNSHARD, in schedules that have it
  double reduce_grad = 0;  // REDUCE_GRAD, in schedules that have it
};

// What a stage keeps for one microbatch, in bytes.
struct MicrobatchMemory {
  // From the start of F to the end of B or I.
  std::int64_t activation = 0;
  // From I to the end of W: what the weight gradient needs. Unset: the same as `activation`, so that I frees
  // nothing.
  std::optional<std::int64_t> between_input_and_weight = std::nullopt;
};

// What a stage keeps in the memory of its rank, in bytes.
struct StageMemory {
  std::int64_t parameters = 0;  // during the whole step
  std::int64_t unsharded = 0;   // in addition, between UNSHARD and RESHARD
  std::int64_t gradients = 0;   // from the stage's first weight gradient to the end of the step
  // Per microbatch, from the start of F to the end of B or I.
  std::int64_t activation = 0;
  // Per microbatch, from I to the end of W: what the weight gradient needs. Unset: the same as `activation`,
  // so that I frees nothing.
  std::optional<std::int64_t> between_input_and_weight = std::nullopt;
  // Microbatches that keep other amounts, such as those whose activations are recomputed. auto_schedule()
  // reserves `activation` for all of them.
  std::map<int, MicrobatchMemory> exceptions = {};

  // Returns what is kept for a microbatch.
  MicrobatchMemory of(int microbatch) const {
    const auto found = exceptions.find(microbatch);
    return found != exceptions.end() ? found->second : MicrobatchMemory{activation, between_input_and_weight};
  }
};

// How communication and computation share a rank's time.
enum class Communication {
  // Transfers and collectives run in parallel to computation; a rank waits only for data that it needs.
  Overlapped,
  // Transfers and collectives block: in a lowered schedule both ranks of a transfer, in a compute-only one
  // the sender.
  Blocking,
};

// The costs of a pipeline.
struct CostModel {
  // Times of each stage, or a single entry that applies to all stages.
  std::vector<StageCost> stages = {StageCost{}};
  // Memory of each stage, or a single entry that applies to all stages.
  std::vector<StageMemory> memory = {StageMemory{}};
  // A transfer between two ranks takes latency + output_bytes / bandwidth. Transfers on one communicator (one
  // direction between two ranks) use its bandwidth one after the other; their latencies overlap.
  double latency = 0;
  double bandwidth = std::numeric_limits<double>::infinity();  // bytes per unit of time
  // Whether communication and computation overlap.
  Communication communication = Communication::Overlapped;
  // The share of the shorter members of an overlapped slot, such as (0F4;3B1)OVERLAP_F_B, that is hidden by
  // the longest member. 0: the slot takes the sum of their times; 1: the longest of them.
  double overlap_saving = 0;

  // The entry of a stage, which must exist; it is not checked.
  const StageCost& cost_of(int stage) const {
    return stages[stages.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  }
  // The memory entry of a stage, which must exist; it is not checked.
  const StageMemory& memory_of(int stage) const {
    return memory[memory.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  }
  // Returns the time of F, B, I, W, UNSHARD or REDUCE_GRAD; 0 for transfers, which depend on both ranks, and
  // for RESHARD.
  double time_of(schedule::ActionKind kind, int stage) const;
  // Returns the time of a slot; overlap_saving applies to its members.
  double time_of(schedule::Slot slot) const;
  // Returns how long a transfer between `stage` and the next stage occupies the communicator.
  double occupancy(int stage) const { return cost_of(stage).output_bytes / bandwidth; }
  // Returns how long a transfer between `stage` and the next stage takes: latency and occupancy.
  double transfer_time(int stage) const { return latency + occupancy(stage); }

  // Throws ValueError unless there are 1 or `stages` entries, all times are in [0, kLongestTime] (transfers
  // included), the bandwidth is positive, overlap_saving is in [0, 1], and no bytes are negative.
  void check(int stages) const;
  // The same; also throws ValueError if the memory of a rank could reach 2^62 bytes under some schedule of
  // this shape.
  void check(const schedule::StageMap& stages, int microbatches) const;
};

// Returns the model of a pipeline with `parts` times as many stages: the times and the memory of every entry
// divided by `parts`. The number of entries and the size of transfers stay the same.
CostModel split_evenly(const CostModel& model, int parts);

// How much a rank may hold at once; std::nullopt: no limit.
struct MemoryLimit {
  std::optional<int> activations;     // maximum of RankSummary::peak_activations
  std::optional<std::int64_t> bytes;  // maximum of RankSummary::peak_bytes
};

}  // namespace penstock::plan
