// The communicators of a pipeline. Activations and gradients, each direction between ranks, and each skip
// connection have a communicator of their own, so that no transfer waits for one of another kind, even on a
// transport that keeps order.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/pipeline/program/program.h"
#include "penstock/stage_placement.h"
#include "penstock/world.h"

namespace penstock {

class ChannelGroups {
 public:
  // Collective over `ranks`, the global ranks of the pipeline, in pipeline order.
  ChannelGroups(const comm::World& world, std::vector<int> ranks, const schedule::StageMap& map,
                const std::vector<SkipConnection>& skips, comm::P2PTransport p2p);

  // The group of a channel between two ranks.
  const comm::Group& group_of(const Channel& channel) const;
  // The group of all ranks of the pipeline, for control messages.
  const comm::Group& control() const { return control_; }
  int global_rank(int pipeline_rank) const { return ranks_[static_cast<std::size_t>(pipeline_rank)]; }
  const std::vector<int>& ranks() const { return ranks_; }

  // Tags within a group. Channels of one kind and direction share a group, so a tag encodes a sending stage
  // and a number, as number * stages + stage: different pairs never get the same tag, however many tensors a
  // border has. The numbers 0 and 1 are for announcements and the warm-up. Throws ValueError if there are
  // more tensors than tags.
  int tag(const Channel& channel, std::size_t tensor) const;
  int announcement_tag(const Channel& channel) const { return numbered_tag(channel, 0); }
  int warm_up_tag(const Channel& channel) const { return numbered_tag(channel, 1); }
  // The number of tensors per channel for which there are tags.
  std::size_t most_tensors() const;

 private:
  int numbered_tag(const Channel& channel, int number) const { return number * stages_ + channel.from_stage; }

  std::vector<int> ranks_;
  int stages_;
  comm::Group control_;
  comm::Group neighbours_[2][2];       // [kind][to a higher rank]
  std::vector<comm::Group> skips_[2];  // [kind]
};

}  // namespace penstock
