// Splits a sequence of layers into stages: contiguous ranges, one per stage, that cover all layers.
//
//   plan::partition_by_count(10, 4);              // 3 3 2 2: the first stages have one layer more
//   plan::partition_at(10, {4, 8});               // 4 4 2: where stages 1, 2, ... begin
//   plan::partition_by_weight({9, 1, 1, 9}, 2);   // 2 2: greedy
//   plan::partition_by_cost({10, 10, 10, 1}, 3);  // 1 1 2: no stage costs more than 11
//   std::vector<double> costs(24, 1.0);
//   plan::partition_by_cost(costs, 4, {.first = 0.5, .last = 2});  // with an embedding and an output head
//
// Limits of memory, and ranks that hold several stages, are in placed_partition.h.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <vector>

namespace penstock::plan {

// The layers of one stage: begin, begin + 1, ... end - 1.
struct LayerRange {
  int begin = 0;  // first layer
  int end = 0;    // one past the last layer
  // Number of layers.
  int size() const { return end - begin; }
  // Compares both members.
  friend bool operator==(const LayerRange&, const LayerRange&) = default;
};

// Splits layers evenly; if that is impossible, the first stages have one layer more. Throws ValueError for
// fewer than one stage and for more stages than layers.
std::vector<LayerRange> partition_by_count(int layers, int stages);

// Splits layers at `boundaries`, the first layers of stages 1, 2, ... Throws ValueError unless they are
// strictly increasing and within [1, layers - 1], and for fewer than one layer.
std::vector<LayerRange> partition_at(int layers, const std::vector<int>& boundaries);

// Splits layers by weight in one pass, the greedy rule that other systems use: a stage takes layers until it
// has its share of the weight that is left, remaining weight / remaining stages, but leaves one layer for
// each later stage; the last stage takes the rest. A heavy layer at the end of a stage can make it much
// heavier than necessary: partition_by_cost() is optimal. Equal weights, also zeros, are split by count.
// Throws ValueError for a weight that is negative, infinite or NaN, and as partition_by_count().
std::vector<LayerRange> partition_by_weight(const std::vector<double>& weights, int stages);

// What the first and the last stage compute besides their layers.
struct PartitionEnds {
  double first = 0;  // cost of the first stage's other work, such as an embedding
  double last = 0;   // cost of the last stage's other work, such as an output head
  // Whether a first or last stage that has other work may have no layers: the output head of a large
  // vocabulary can cost as much as many layers.
  bool may_be_empty = false;
};

// Returns the split whose most expensive stage is cheapest; among these, the most even one (least sum of
// squares); among these, the one whose first stages are longest. With equal costs this is partition_by_count.
// Throws ValueError for a cost that is negative, infinite or NaN, for fewer than one stage, and for more
// stages than layers, not counting stages that may be empty.
std::vector<LayerRange> partition_by_cost(const std::vector<double>& costs, int stages,
                                          const PartitionEnds& ends = {});

// Returns the cost of the most expensive stage. `parts` must be ranges of `costs`; they are not checked.
double heaviest(const std::vector<LayerRange>& parts, const std::vector<double>& costs,
                const PartitionEnds& ends = {});

}  // namespace penstock::plan
