// Draws how the layers of a model are divided over the stages and ranks of a pipeline.
//
//   draw_partition({.title = "hybrid-52", .summary = "...", .ranks = 2, .stages = {...}})
//
// A row for each rank: its stages with a letter for each layer, and what they cost and hold as bars that are
// comparable between ranks.
#pragma once

#include <string>
#include <vector>

namespace penstock::plan {

struct DrawnStage {
  int stage = 0;
  int rank = 0;
  std::string letters;     // of its layers
  bool has_first = false;  // the embedding
  bool has_last = false;   // the head
  double cost = 0;         // in any unit
  double bytes = 0;
  std::string hover;  // shown by the viewer
};

struct PartitionDrawing {
  std::string title;
  std::string summary;  // a line below the title
  int ranks = 1;
  std::vector<DrawnStage> stages;  // in any order
  std::vector<double> limits;      // bytes, by rank; empty: none
};

// Returns an SVG picture.
std::string draw_partition(const PartitionDrawing& drawing);

}  // namespace penstock::plan
