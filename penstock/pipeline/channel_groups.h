// The communicators of a pipeline: for activations and for gradients, for each direction between ranks and for each skip
// connection one of its own, so that no transfer ever waits behind one of another kind, also on a transport that keeps order.
#pragma once

#include <string>
#include <vector>

#include "penstock/comm/world.h"
#include "penstock/pipeline/program.h"
#include "penstock/schedule/placement.h"

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
  Rank global_rank(int pipeline_rank) const { return Rank{ranks_[static_cast<std::size_t>(pipeline_rank)]}; }
  const std::vector<int>& ranks() const { return ranks_; }

  // Tags within a group: tensors of a border have one each, what is announced about them another one, and so has the warm-up.
  static constexpr int kTensorsOfABorder = 1000;
  static int tag(const Channel& channel, int tensor) { return channel.from_stage * (kTensorsOfABorder + 2) + tensor; }
  static int announcement_tag(const Channel& channel) { return tag(channel, kTensorsOfABorder); }
  static int warm_up_tag(const Channel& channel) { return tag(channel, kTensorsOfABorder + 1); }

 private:
  std::vector<int> ranks_;
  comm::Group control_;
  comm::Group neighbours_[2][2];  // [kind][to a higher rank]
  std::vector<comm::Group> skips_[2];  // [kind]
};

}  // namespace penstock::pipeline
