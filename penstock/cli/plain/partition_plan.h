// What `penstock partition` shows: a model divided over the stages and ranks of a pipeline, beside other
// ways to divide it.
//
//   const PartitionPlan plan = plan_partition(resolved.config, request);
//   plan.chosen.loads.rank_costs
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/model_plan.h"
#include "penstock/placed_partition.h"
#include "penstock/train_config.h"

namespace penstock::cli {

// What the flags of the command ask for.
struct PartitionRequest {
  int stages = 0;                                     // 0: as in the layout
  std::string by;                                     // count, weight, cost, pattern or cuts
  std::vector<int> cuts;                              // for "cuts"
  std::optional<schedule::StagePlacement> placement;  // default: that of the layout's schedule
  plan::Slowest minimize = plan::Slowest::Stage;      // for "cost"
  std::vector<double> limits;                         // bytes, by rank, or one for all
  std::vector<double> activations;                    // bytes, by stage, or one for all
  std::string costs;                                  // file of measured costs; empty: estimated
};

// One way to divide the model.
struct DividedModel {
  std::string by;
  std::vector<models::StagePart> parts;  // of one copy of the model
  plan::PlacedLoads loads;
  double lower_bound = 0;   // for "cost": of loads.slowest
  bool is_optimal = false;  // for "cost"
  bool fits = true;         // within the limits
};

struct PartitionPlan {
  models::ModelPlan model;
  plan::PlacedLayers layers;
  std::vector<int> stage_to_rank;
  bool measured = false;         // costs are measured, not estimated
  bool has_activations = false;  // memory includes them
  DividedModel chosen;
  std::vector<DividedModel> others;  // by count, by weight and by cost, if the model can be divided so
};

// Throws ConfigError for values that do not fit together, and for limits that no split, or not the requested
// one, keeps.
PartitionPlan plan_partition(const train::TrainConfig& config, const PartitionRequest& request);

}  // namespace penstock::cli
