// Sums the gradients of the two copies of each part in a bidirectional pipeline: each copy has seen half of
// the microbatches.
#pragma once

#include <vector>

#include "penstock/stage.h"
#include "penstock/stage_placement.h"
#include "penstock/world.h"

namespace penstock {

class CopyGradients {
 public:
  // Collective over the pairs of ranks that hold copies of a part; does nothing in pipelines with one chain.
  // Throws ValueError if the copies cannot be matched because the two chains have different numbers of
  // stages.
  CopyGradients(const comm::World& world, const std::vector<int>& ranks, const schedule::StageMap& map,
                std::vector<PipelineStage> stages);

  // Adds to the gradient of each parameter of this rank the gradient of its copy. A parameter without a
  // gradient on both sides stays without one. Throws PipeliningMetadataError on both ranks, naming the first
  // parameter whose dtype, shape, placements or requires_grad differ.
  void sum();
  // Connects the pairs by a sum of one element each, so that the first `sum` finds existing communicators.
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

}  // namespace penstock
