#include "penstock/pipeline/runtime/channel_warm_up.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdint>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

// FNV-1a: the same number in every process.
std::int64_t fingerprint(const schedule::StageMap& map, const std::vector<SkipConnection>& skips) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&](std::int64_t value) {
    for (int byte = 0; byte < 8; ++byte)
      hash = (hash ^ ((static_cast<std::uint64_t>(value) >> (8 * byte)) & 0xff)) * 0x100000001b3ULL;
  };
  add(map.stages());
  for (const int rank : map.stage_to_rank()) add(rank);
  for (const schedule::Chain& chain : map.chains()) {
    add(chain.first_stage);
    add(chain.stages);
  }
  for (const SkipConnection& skip : skips) {
    add(skip.from);
    add(skip.to);
  }
  return static_cast<std::int64_t>(hash);
}

void check_same_channels(const ChannelGroups& groups, std::int64_t own) {
  const auto count = static_cast<std::int64_t>(groups.ranks().size());
  at::Tensor mine = at::full({1}, own, at::kLong);
  at::Tensor all = at::empty({count}, at::kLong);
  groups.control().all_gather(all, mine, {.label = "warm-up of the pipeline", .timeout = {}}).wait();
  const auto* said = all.data_ptr<std::int64_t>();
  for (std::int64_t i = 1; i < count; ++i)
    if (said[i] != said[0])
      throw PipeliningMetadataError(
          describe("ranks of a pipeline disagree: places of its stages and skip connections",
                   fmt::format("different ones on rank {}", groups.ranks()[static_cast<std::size_t>(i)]),
                   fmt::format("those of rank {}", groups.ranks()[0]),
                   "make the schedule and the list of skip connections the same on all ranks"));
}

}  // namespace

int warm_up_channels(const ChannelGroups& groups, const Program& program, const schedule::StageMap& map,
                     const std::vector<SkipConnection>& skips, const std::vector<PipelineStage>& stages) {
  if (groups.ranks().size() == 1) return 0;
  check_same_channels(groups, fingerprint(map, skips));
  const auto device_of = [&](int index) {
    for (const PipelineStage& stage : stages)
      if (stage.index() == index) return stage.device();
    PENSTOCK_INVARIANT(false, "a channel of this rank begins or ends at one of its stages");
  };
  struct Arrival {
    const Channel* channel;
    at::Tensor value;
  };
  std::vector<comm::Work> works;
  std::vector<Arrival> arrivals;
  // The channels of a program are in the order of the stages, on every rank.
  for (const Channel& channel : program.channels) {
    if (channel.local()) continue;
    const comm::P2POptions options{
        .tag = groups.warm_up_tag(channel), .label = "warm-up: " + to_text(channel), .timeout = {}};
    const bool sends = channel.from_rank == program.rank;
    const at::Tensor value =
        at::full({1}, sends ? channel.from_stage : -1,
                 at::device(device_of(sends ? channel.from_stage : channel.to_stage)).dtype(at::kFloat));
    if (sends) {
      works.push_back(groups.group_of(channel).isend(value, groups.global_rank(channel.to_rank), options));
    } else {
      works.push_back(groups.group_of(channel).irecv(value, groups.global_rank(channel.from_rank), options));
      arrivals.push_back({&channel, value});
    }
  }
  comm::wait_all(works);
  for (const Arrival& arrival : arrivals)
    if (const float value = arrival.value.item<float>();
        value != static_cast<float>(arrival.channel->from_stage))
      throw PipeliningMetadataError(describe(fmt::format("warm-up of {}", to_text(*arrival.channel)),
                                             fmt::format("the index of stage {}", value),
                                             fmt::format("that of stage {}", arrival.channel->from_stage),
                                             "make the schedule the same on all ranks"));
  return static_cast<int>(works.size());
}

}  // namespace penstock
