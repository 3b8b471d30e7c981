#include "penstock/pipeline/runtime/channel_groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

const char* kind_text(Channel::Kind kind) {
  return kind == Channel::Kind::Activation ? "activations" : "gradients";
}

}  // namespace

ChannelGroups::ChannelGroups(const comm::World& world, std::vector<int> ranks, const schedule::StageMap& map,
                             const std::vector<SkipConnection>& skips, comm::P2PTransport p2p)
    : ranks_(std::move(ranks)), stages_(map.stages()) {
  if (ranks_.size() == 1) return;
  if (p2p == comm::P2PTransport::Auto) p2p = world.low_latency_transport();
  control_ = world.group_of(ranks_, {.purpose = "pipeline.control", .timeout = {}});
  bool used[2][2] = {};
  for (int stage = 0; stage + 1 < map.stages(); ++stage) {
    if (map.is_last(stage)) continue;
    const int here = map.rank_of(stage);
    const int next = map.rank_of(stage + 1);
    if (here == next) continue;
    used[0][next > here] = true;
    used[1][here > next] = true;
  }
  for (const Channel::Kind kind : {Channel::Kind::Activation, Channel::Kind::Gradient}) {
    const auto k = static_cast<std::size_t>(kind);
    for (const bool up : {true, false})
      if (used[k][up])
        neighbours_[k][up] = world.group_of(
            ranks_, {.purpose = fmt::format("pipeline.{}.{}", kind_text(kind), up ? "up" : "down"),
                     .p2p = p2p,
                     .timeout = {}});
    skips_[k].resize(skips.size());
    for (std::size_t i = 0; i < skips.size(); ++i) {
      std::vector<int> pair = {ranks_[static_cast<std::size_t>(map.rank_of(skips[i].from))],
                               ranks_[static_cast<std::size_t>(map.rank_of(skips[i].to))]};
      if (pair[0] == pair[1] || std::find(pair.begin(), pair.end(), world.rank()) == pair.end()) continue;
      skips_[k][i] = world.group_of(
          pair,
          {.purpose = fmt::format("pipeline.skip{}.{}", i, kind_text(kind)), .p2p = p2p, .timeout = {}});
    }
  }
}

std::size_t ChannelGroups::most_tensors() const {
  return static_cast<std::size_t>(comm::Group::kMaxTag / stages_) - 2;
}

int ChannelGroups::tag(const Channel& channel, std::size_t tensor) const {
  if (tensor >= most_tensors())
    throw ValueError(
        describe(fmt::format("tensors of {}", to_text(channel)), fmt::format("more than {}", tensor),
                 fmt::format("at most {} in a pipeline of {} stages", most_tensors(), stages_),
                 "concatenate tensors before they leave the stage, for example with torch::cat"));
  return numbered_tag(channel, static_cast<int>(tensor) + 2);
}

const comm::Group& ChannelGroups::group_of(const Channel& channel) const {
  const auto k = static_cast<std::size_t>(channel.kind);
  return channel.skip >= 0 ? skips_[k][static_cast<std::size_t>(channel.skip)]
                           : neighbours_[k][channel.to_rank > channel.from_rank];
}

}  // namespace penstock
