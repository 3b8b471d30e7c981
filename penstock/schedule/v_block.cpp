#include "penstock/schedule/v_block.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "penstock/base/errors.h"

namespace penstock::schedule {

namespace {

constexpr int kPeriod = 6;

// Times of microbatch 0 on one rank. Order: F of chunks 0 and 1, I of chunks 1 and 0, W of chunks 1 and 0.
using BlockTimes = std::array<int, kPeriod>;

// Waiting steps at the three turns of a microbatch's way: between the chunks, before the loss gradient, and back.
using Turns = std::array<int, 3>;

// None when two of the actions fall on the same step of the period.
std::optional<BlockTimes> block_times(const VBlockOffsets& offsets, const Turns& turns, int ranks, int rank) {
  const int last = ranks - 1;
  const int first_forward_up = last * offsets.forward_down + 1 + turns[0];
  const int first_backward_down = first_forward_up + last * offsets.forward_up + 1 + turns[1];
  const int first_backward_up = first_backward_down + last * offsets.backward_down + 1 + turns[2];
  BlockTimes times = {rank * offsets.forward_down, first_forward_up + (last - rank) * offsets.forward_up,
                      first_backward_down + rank * offsets.backward_down,
                      first_backward_up + (last - rank) * offsets.backward_up, 0, 0};
  std::array<bool, kPeriod> taken = {};
  for (int i = 0; i < 4; ++i) {
    bool& slot = taken[static_cast<std::size_t>(times[static_cast<std::size_t>(i)] % kPeriod)];
    if (slot) return std::nullopt;
    slot = true;
  }
  // Each W takes the first free step behind its I.
  for (const auto& [weight, input] : {std::pair{4, 2}, std::pair{5, 3}}) {
    int time = times[static_cast<std::size_t>(input)] + 1;
    while (taken[static_cast<std::size_t>(time % kPeriod)]) ++time;
    taken[static_cast<std::size_t>(time % kPeriod)] = true;
    times[static_cast<std::size_t>(weight)] = time;
  }
  return times;
}

// The shortest waits that keep the block free of collisions on every rank.
Turns find_turns(const VBlockOffsets& offsets, int ranks) {
  std::optional<Turns> best;
  const int ranks_to_check = std::min(ranks, kPeriod);  // times modulo the period repeat after that many ranks
  for (int sum = 0; sum <= 3 * (kPeriod - 1) && !best; ++sum) {
    for (int a = 0; a <= std::min(sum, kPeriod - 1) && !best; ++a) {
      for (int b = 0; b <= std::min(sum - a, kPeriod - 1) && !best; ++b) {
        const Turns turns = {a, b, sum - a - b};
        if (turns[2] >= kPeriod) continue;
        bool free = true;
        for (int rank = 0; rank < ranks_to_check && free; ++rank) {
          free = block_times(offsets, turns, ranks, rank).has_value();
        }
        if (free) best = turns;
      }
    }
  }
  PENSTOCK_INVARIANT(best.has_value(), "some waits make the block of a V schedule free of collisions");
  return *best;
}

}  // namespace

Schedule v_block_schedule(const PipelineShape& shape, const VBlockOffsets& offsets) {
  const int ranks = shape.ranks;
  const int stages = 2 * ranks;
  const Turns turns = find_turns(offsets, ranks);
  Schedule schedule(StageMap::make(Placement::V, ranks, stages, shape.microbatches));
  for (int rank = 0; rank < ranks; ++rank) {
    const BlockTimes times = *block_times(offsets, turns, ranks, rank);
    const int chunk0 = rank;
    const int chunk1 = stages - 1 - rank;
    struct Stream {
      int start;
      ActionKind kind;
      int stage;
    };
    std::array<Stream, kPeriod> streams = {{{times[0], ActionKind::Forward, chunk0},
                                            {times[1], ActionKind::Forward, chunk1},
                                            {times[2], ActionKind::BackwardInput, chunk1},
                                            {times[3], ActionKind::BackwardInput, chunk0},
                                            {times[4], ActionKind::BackwardWeight, chunk1},
                                            {times[5], ActionKind::BackwardWeight, chunk0}}};
    std::sort(streams.begin(), streams.end(),
              [](const Stream& a, const Stream& b) { return a.start % kPeriod < b.start % kPeriod; });
    Row& row = schedule.row(rank);
    row.reserve(kPeriod * static_cast<std::size_t>(shape.microbatches));
    const int end = *std::max_element(times.begin(), times.end()) / kPeriod + shape.microbatches;
    for (int period = 0; period <= end; ++period) {
      for (const Stream& stream : streams) {
        const int microbatch = period - stream.start / kPeriod;
        if (microbatch < 0 || microbatch >= shape.microbatches) continue;
        row.push(Action(stream.kind, StageId{stream.stage}, MicrobatchId{microbatch}));
      }
    }
  }
  return schedule;
}

}  // namespace penstock::schedule
