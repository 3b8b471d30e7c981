// Splits layers into stages for ranks that hold several stages, within the memory of every rank.
//
//   plan::PlacedLayers layers;
//   layers.placement = schedule::StagePlacement::V;
//   layers.ranks = 2;
//   layers.stages = 4;                      // rank 0 holds stages 0 and 3, rank 1 stages 1 and 2
//   layers.costs = {1, 8, 1, 8, 1, 8, 1, 8};
//   layers.bytes = {2, 9, 2, 9, 2, 9, 2, 9};
//   layers.limits = {24};                   // of every rank
//   plan::PlacedPartition best = plan::partition_placed(layers);
//   std::cout << best.loads.slowest;        // no split within the limit has a faster slowest rank
//
// A rank computes all of its stages, so what a step waits for is the rank with the largest sum, and what must
// fit is the sum of its stages, too. The split is optimal, not a heuristic: see partition_placed().
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/partition.h"
#include "penstock/stage_placement.h"

namespace penstock::plan {

// What partition_placed() makes as small as possible.
enum class Slowest {
  Rank,   // the largest sum of the costs of a rank's stages: the time of a step without idle time
  Stage,  // the largest cost of a stage, as partition_by_cost()
};

// Layers, and the stages that they are to be divided into. Lists per stage and per rank have one value for
// each, or one for all, or none for zero (limits: no limit).
struct PlacedLayers {
  // Where stages are. A loop or V may have any number of stages: the last leg may end early, and ranks may
  // have no stage.
  schedule::StagePlacement placement = schedule::StagePlacement::Loop;
  int ranks = 1;  // ranks of the pipeline
  // Number of stages. In a bidirectional placement twice the ranks: stage ranks + s holds the same layers as
  // stage s.
  int stages = 1;
  // What is minimized.
  Slowest minimize = Slowest::Rank;

  std::vector<double> costs = {};  // time of each layer
  PartitionEnds ends = {};         // costs besides the layers

  std::vector<double> bytes = {};  // memory of each layer: parameters, gradients, optimizer state; none: zero
  double first_bytes = 0;          // the same, of what is on the first stage besides its layers
  double last_bytes = 0;           // the same, of the last stage
  std::vector<double> kept = {};  // bytes that a layer keeps of one microbatch until its backward; none: zero
  double first_kept = 0;          // the same, of what is on the first stage besides its layers
  double last_kept = 0;           // the same, of the last stage
  std::vector<double> microbatches = {};  // by stage: how many are kept at once
  std::vector<double> stage_bytes = {};   // by stage: memory that does not depend on its layers
  std::vector<double> limits = {};        // by rank: bytes that it may hold

  // How many cuts are tried at most: about as many as in half a second. One stage per rank needs a small part
  // of it; two stages per rank of a model with hundreds of layers may need more.
  std::int64_t max_states = 10'000'000;
};

// What stages and ranks cost and hold.
struct PlacedLoads {
  std::vector<double> stage_costs;  // by stage
  std::vector<double> stage_bytes;  // by stage
  std::vector<double> rank_costs;   // by rank: sums of its stages
  std::vector<double> rank_bytes;   // by rank: sums of its stages
  double slowest = 0;               // the largest of rank_costs or of stage_costs, as PlacedLayers::minimize
};

// A split of placed layers.
struct PlacedPartition {
  std::vector<LayerRange> parts;  // by stage; in a bidirectional placement those of the first copy
  PlacedLoads loads;              // of this split
  // No split within the limits has a smaller `loads.slowest` than this. Equal to it up to rounding, unless
  // the search ended at PlacedLayers::max_states.
  double lower_bound = 0;
  // Returns whether no split is better.
  bool is_optimal() const { return lower_bound >= loads.slowest * (1 - 1e-9); }
};

// Returns the split within the limits whose slowest rank (or stage) is fastest. With one stage per rank, and
// with Slowest::Stage, it is partition_by_cost() if that is within the limits; otherwise which one of equally
// good splits is returned is not specified, but always the same.
//
// The search is exact: for a bound on the slowest rank it decides whether a split exists, rank by rank, over
// the positions of the cuts between placed and unplaced stages, and bisects the bound. Every further stage of
// a rank multiplies the number of such positions by up to the number of layers; `max_states` limits the time.
//
// Throws ValueError for values that are negative, infinite or NaN, for lists of other lengths, for counts as
// schedule::stage_to_rank() and partition_by_cost(), and if no split is within the limits: the message says
// which layer does not fit on any rank, or the smallest limit that would be enough.
PlacedPartition partition_placed(const PlacedLayers& layers);

// Returns the loads of any split. Throws ValueError as partition_placed(), but not because of the limits, and
// for parts that are not ranges of the layers, one for each stage of a copy.
PlacedLoads placed_loads(const PlacedLayers& layers, const std::vector<LayerRange>& parts);

}  // namespace penstock::plan
