// The gradients of the two copies of a bidirectional pipeline, summed: each copy has seen half of the microbatches.
#pragma once

#include <vector>

#include "penstock/world.h"
#include "penstock/stage.h"
#include "penstock/stage_placement.h"

namespace penstock::pipeline {

class CopyGradients {
 public:
  // Collective over the pairs of ranks that hold copies of a part; nothing in pipelines of one chain. Throws ValueError where copies
  // on this rank and elsewhere cannot be compared: another number of stages in one chain than in the other.
  CopyGradients(const comm::World& world, const std::vector<int>& ranks, const schedule::StageMap& map, std::vector<PipelineStage> stages);

  // Adds, to the gradients of every parameter of this rank, those of its copy. A parameter that has none on either side keeps none.
  // Throws PipeliningMetadataError, on both ranks, that names the first parameter whose dtype, shape, placements or requires_grad differ.
  void sum();
  // Connects the pairs: a sum of one element each, so that the first `sum` finds communicators that exist.
  void warm_up();
  bool any() const { return !pairs_.empty(); }

 private:
  struct Pair {
    PipelineStage stage;
    int lower_stage;  // of the two, for messages
    comm::Group group;
  };
  std::vector<Pair> pairs_;  // in the order of the parts
};

}  // namespace penstock::pipeline
