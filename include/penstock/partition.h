// Cutting a row of layers into stages: contiguous, complete, one range for each stage. Pure functions.
//
//   partition_by_count(10, 4);                        // 3 3 2 2: the first stages get one more
//   partition_at(10, {4, 8});                         // 4 4 2: where stages 1, 2, ... begin
//   partition_by_cost({10, 10, 10, 1}, 3);            // 1 1 2: no stage costs more than 11
//   partition_by_cost(costs, 4, {.first = embedding, .last = head});
#pragma once

#include <vector>

namespace penstock::plan {

// Layers begin, begin + 1, ... end - 1.
struct LayerRange {
  int begin = 0;
  int end = 0;
  int size() const { return end - begin; }
  friend bool operator==(const LayerRange&, const LayerRange&) = default;
};

// Throws ValueError for fewer than one stage and for more stages than layers.
std::vector<LayerRange> partition_by_count(int layers, int stages);

// `boundaries`: the first layers of stages 1, 2, ... Throws ValueError unless they are sorted, unique and within 1 .. layers - 1.
std::vector<LayerRange> partition_at(int layers, const std::vector<int>& boundaries);

// What the first and the last stage do besides their layers.
struct PartitionEnds {
  double first = 0;
  double last = 0;
  // Then a stage at an end that costs something by itself may have no layers: the output head of a large vocabulary can be as much as
  // many layers.
  bool may_be_empty = false;
};

// The split whose most expensive stage is as cheap as can be; among these the most even one (least sum of squares); among these the one
// whose first stages are the longest. So equal costs give partition_by_count. Takes layers + stages x the places
// where a stage can end, which are few where stages are many.
// Throws ValueError for a negative or endless cost, fewer than one stage, and more stages than there can be.
std::vector<LayerRange> partition_by_cost(const std::vector<double>& costs, int stages, const PartitionEnds& ends = {});

// Cost of the most expensive stage.
double heaviest(const std::vector<LayerRange>& parts, const std::vector<double>& costs, const PartitionEnds& ends = {});

}  // namespace penstock::plan
