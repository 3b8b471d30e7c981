#include "penstock/stage_placement.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::schedule {

namespace {

void check_counts(int ranks, int stages) {
  if (ranks < 1) throw ValueError(describe("pipeline ranks", fmt::format("{}", ranks), "at least 1"));
  if (stages < 1) throw ValueError(describe("pipeline stages", fmt::format("{}", stages), "at least 1"));
}

}  // namespace

StagePlacement parse_stage_placement(std::string_view name) {
  const std::string lower = to_lower(name);
  if (lower == "loop") return StagePlacement::Loop;
  if (lower == "v") return StagePlacement::V;
  if (lower == "bidirectional") return StagePlacement::Bidirectional;
  throw ValueError(describe("stage placement", fmt::format("\"{}\"", name), "loop, v or bidirectional"));
}

std::string_view to_text(StagePlacement placement) {
  switch (placement) {
    case StagePlacement::Loop:
      return "loop";
    case StagePlacement::V:
      return "v";
    case StagePlacement::Bidirectional:
      return "bidirectional";
  }
  PENSTOCK_INVARIANT(false, "every placement has a text");
}

std::vector<int> stage_to_rank(StagePlacement placement, int ranks, int stages, PartialLeg partial) {
  check_counts(ranks, stages);
  const bool uneven = stages % ranks != 0;
  if (placement == StagePlacement::V && uneven && partial == PartialLeg::Refuse) {
    throw ValueError(describe(fmt::format("V placement over {} ranks", ranks),
                              fmt::format("{} stages", stages), fmt::format("a multiple of {}", ranks),
                              "change the stage count or allow a partial last leg"));
  }
  if (placement == StagePlacement::Bidirectional && stages != 2 * ranks) {
    throw ValueError(describe(fmt::format("bidirectional placement over {} ranks", ranks),
                              fmt::format("{} stages", stages), fmt::format("{} (two copies)", 2 * ranks)));
  }
  std::vector<int> map(static_cast<std::size_t>(stages));
  for (int stage = 0; stage < stages; ++stage) {
    const int leg = stage / ranks;
    const int step = stage % ranks;
    const bool down = placement != StagePlacement::Loop && leg % 2 == 1;
    map[static_cast<std::size_t>(stage)] = down ? ranks - 1 - step : step;
  }
  return map;
}

std::vector<std::vector<int>> rank_to_stages(StagePlacement placement, int ranks, int stages,
                                             PartialLeg partial) {
  const std::vector<int> map = stage_to_rank(placement, ranks, stages, partial);
  std::vector<std::vector<int>> result(static_cast<std::size_t>(ranks));
  for (int stage = 0; stage < stages; ++stage) {
    result[static_cast<std::size_t>(map[static_cast<std::size_t>(stage)])].push_back(stage);
  }
  return result;
}

StageMap::StageMap(int ranks, std::vector<int> stage_to_rank, int microbatches)
    : StageMap(ranks, stage_to_rank,
               {Chain{0, static_cast<std::int32_t>(stage_to_rank.size()), 0, microbatches}}) {}

StageMap::StageMap(int ranks, std::vector<int> stage_to_rank, std::vector<Chain> chains)
    : ranks_(ranks), stage_to_rank_(std::move(stage_to_rank)), chains_(std::move(chains)), microbatches_(0) {
  check_counts(ranks_, stages());
  for (std::size_t stage = 0; stage < stage_to_rank_.size(); ++stage) {
    const int rank = stage_to_rank_[stage];
    if (rank < 0 || rank >= ranks_) {
      throw ValueError(describe(fmt::format("rank of stage {}", stage), fmt::format("{}", rank),
                                fmt::format("0 to {}", ranks_ - 1)));
    }
  }
  std::int32_t next_stage = 0;
  for (const Chain& chain : chains_) {
    if (chain.first_stage != next_stage || chain.stages < 1) {
      throw ValueError(describe("chain of stages",
                                fmt::format("{} stages from stage {}", chain.stages, chain.first_stage),
                                fmt::format("at least 1 from stage {}", next_stage)));
    }
    if (chain.first_microbatch != microbatches_ || chain.microbatches < 0) {
      throw ValueError(describe("microbatches of a chain",
                                fmt::format("{} from {}", chain.microbatches, chain.first_microbatch),
                                fmt::format("a count from {}", microbatches_)));
    }
    next_stage += chain.stages;
    microbatches_ += chain.microbatches;
  }
  if (next_stage != stages()) {
    throw ValueError(
        describe("stages in chains", fmt::format("{}", next_stage), fmt::format("{}", stages())));
  }
}

StageMap StageMap::make(StagePlacement placement, int ranks, int stages, int microbatches) {
  std::vector<int> map = penstock::schedule::stage_to_rank(placement, ranks, stages);
  if (placement != StagePlacement::Bidirectional) return StageMap(ranks, std::move(map), microbatches);
  if (microbatches % 2 != 0) {
    throw ValueError(describe("microbatches of a bidirectional schedule", fmt::format("{}", microbatches),
                              "an even number, half of them for each direction"));
  }
  const int half = microbatches / 2;
  return StageMap(ranks, std::move(map), {Chain{0, ranks, 0, half}, Chain{ranks, ranks, half, half}});
}

std::vector<int> StageMap::stages_of(int rank) const {
  std::vector<int> result;
  for (int stage = 0; stage < stages(); ++stage) {
    if (stage_to_rank_[static_cast<std::size_t>(stage)] == rank) result.push_back(stage);
  }
  return result;
}

}  // namespace penstock::schedule
