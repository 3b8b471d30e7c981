// The communicators of a pipeline: for activations and for gradients, for each direction between ranks and for each skip
// connection one of its own, so that no transfer ever waits behind one of another kind, also on a transport that keeps order.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/world.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/stage_placement.h"

namespace penstock::pipeline {

class ChannelGroups {
 public:
  // Collective over `ranks`, the global ranks of the pipeline in its order.
  ChannelGroups(const comm::World& world, std::vector<int> ranks, const schedule::StageMap& map, const std::vector<SkipConnection>& skips,
                comm::P2PTransport p2p);

  // Of a channel between two ranks.
  const comm::Group& group_of(const Channel& channel) const;
  // For words about the step; of all ranks of the pipeline.
  const comm::Group& control() const { return control_; }
  int global_rank(int pipeline_rank) const { return ranks_[static_cast<std::size_t>(pipeline_rank)]; }
  const std::vector<int>& ranks() const { return ranks_; }

  // Tags within a group. Channels of one kind and direction share a group, so a tag is the pair of a sending stage and a number, written
  // with the stage as its lowest digit to the base of the number of stages: two pairs never give one tag, however many tensors a border
  // has. The numbers 0 and 1 are announcements and the warm-up. Throws ValueError for more tensors than there are tags.
  int tag(const Channel& channel, std::size_t tensor) const;
  int announcement_tag(const Channel& channel) const { return numbered_tag(channel, 0); }
  int warm_up_tag(const Channel& channel) const { return numbered_tag(channel, 1); }
  // Of one channel, that have tags.
  std::size_t most_tensors() const;

 private:
  int numbered_tag(const Channel& channel, int number) const { return number * stages_ + channel.from_stage; }

  std::vector<int> ranks_;
  int stages_;
  comm::Group control_;
  comm::Group neighbours_[2][2];  // [kind][to a higher rank]
  std::vector<comm::Group> skips_[2];  // [kind]
};

}  // namespace penstock::pipeline
