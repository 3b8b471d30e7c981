// Reports what a configuration would do without training: mesh, partition, schedule, memory, predicted time.
// Starts no ranks.
//
//   std::puts(to_text(dry_run(config)).c_str());
//
// Throws for everything that training would refuse because of the configuration or the data, including damage
// in the data to be read. Takes time in proportion to the layers and to the data. The text has at most
// kDryRunLines lines, whatever the number of ranks and layers: equal neighbours are merged, and lines in the
// middle are omitted if there are too many.
//
// Times are measured on one block, an embedding and a head on this machine (part_costs.h) and combined by the
// simulator. Not included: sums over replicas and tensor-parallel ranks, the optimizer update, reading data.
// See memory_plan.h for what memory includes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/model_plan.h"
#include "penstock/recompute_plan.h"
#include "penstock/schedule.h"
#include "penstock/simulator.h"
#include "penstock/train/job/configured_data.h"
#include "penstock/train/plan/memory_plan.h"
#include "penstock/train/plan/part_costs.h"
#include "penstock/train_config.h"

namespace penstock::train {

struct DryRun {
  TrainConfig config;
  std::string device;
  std::string data;  // description of the training data
  int cores = 1;     // of this machine, shared by all ranks
  schedule::Schedule schedule;
  models::ModelPlan plan;
  std::vector<models::StagePart> parts;  // of the model; a bidirectional schedule runs each twice
  models::RecomputePlan recompute;
  PartMeasurements measured;
  plan::Simulation simulation;     // of one run of the schedule, in seconds
  std::vector<RankMemory> memory;  // by pipeline rank
  double step_seconds = 0;
  std::int64_t tokens_per_step = 0;
  std::string graphs = {};  // with training.compile: where the graphs of the stages will come from
};

// Throws ConfigError for more ranks than `penstock train` starts on one host.
void check_local_ranks(const LayoutConfig& layout);
// Throws ConfigError unless another launcher has started as many ranks as the layout has. Their number is not
// limited.
void check_launched_ranks(const LayoutConfig& layout, int launched);

// Throws ConfigError for what training would refuse. `progress` is called on this thread with the current
// activity; it may be empty.
DryRun dry_run(const TrainConfig& config, const DataCheckProgress& progress = {});

inline constexpr std::size_t kDryRunLines = 40;

std::string to_text(const DryRun& run);

}  // namespace penstock::train
