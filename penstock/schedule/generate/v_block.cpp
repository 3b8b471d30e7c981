#include "penstock/schedule/generate/v_block.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::schedule {

namespace {

constexpr int kPeriod = 6;

// Times of microbatch 0 on one rank. Order: F of chunks 0 and 1, I of chunks 1 and 0, W of chunks 1 and 0.
using BlockTimes = std::array<int, kPeriod>;

// Waiting steps at the three turns of a microbatch's path: between the chunks, before the loss gradient, and
// on the way back between the chunks.
using Turns = std::array<int, 3>;

// Chunks held at once by this rank once the block repeats: forwards started minus weight gradients done.
int held_chunks(const BlockTimes& times) {
  int most = 0;
  for (int step = 0; step < kPeriod; ++step) {
    const int now =
        kPeriod * (*std::ranges::max_element(times) / kPeriod + 1) + step;  // every action repeats by then
    const auto ran = [&](int i) { return (now - times[static_cast<std::size_t>(i)]) / kPeriod; };
    most = std::max(most, ran(0) + ran(1) - ran(4) - ran(5));
  }
  return most;
}

// Returns std::nullopt if two of the actions fall on the same step of the period.
std::optional<BlockTimes> block_times(const VBlockOffsets& offsets, const Turns& turns, int ranks, int rank) {
  const int last = ranks - 1;
  const int first_forward_up = last * offsets.forward_down + 1 + turns[0];
  const int first_backward_down = first_forward_up + last * offsets.forward_up + 1 + turns[1];
  const int first_backward_up = first_backward_down + last * offsets.backward_down + 1 + turns[2];
  BlockTimes times = {rank * offsets.forward_down,
                      first_forward_up + (last - rank) * offsets.forward_up,
                      first_backward_down + rank * offsets.backward_down,
                      first_backward_up + (last - rank) * offsets.backward_up,
                      0,
                      0};
  std::array<bool, kPeriod> taken = {};
  for (int i = 0; i < 4; ++i) {
    bool& slot = taken[static_cast<std::size_t>(times[static_cast<std::size_t>(i)] % kPeriod)];
    if (slot) return std::nullopt;
    slot = true;
  }
  // Each W takes the first of the two free steps after its I; each rank decides which W chooses first.
  std::optional<BlockTimes> best;
  for (const auto& order : {std::array{4, 5}, std::array{5, 4}}) {
    std::array<bool, kPeriod> free = taken;
    for (const int weight : order) {
      int time = times[static_cast<std::size_t>(weight - 2)] + 1;
      while (free[static_cast<std::size_t>(time % kPeriod)]) ++time;
      free[static_cast<std::size_t>(time % kPeriod)] = true;
      times[static_cast<std::size_t>(weight)] = time;
    }
    if (!best || held_chunks(times) < held_chunks(*best)) best = times;
  }
  return best;
}

struct VBlock {
  VBlockOffsets offsets;
  Turns turns;
};

// Of all blocks without collisions on any rank, returns the one that holds least, then the shortest.
VBlock best_block(std::span<const VBlockOffsets> candidates, int ranks) {
  // Collisions repeat with the period. So does what a rank holds, except for a part that changes linearly
  // along the ranks and is largest at one of the ends; checking both ends is enough.
  std::vector<int> sample;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank < 2 * kPeriod || rank >= ranks - 2 * kPeriod) sample.push_back(rank);
  }
  std::optional<VBlock> best;
  std::pair<int, int> best_cost;
  for (const VBlockOffsets& offsets : candidates) {
    for (int code = 0; code < kPeriod * kPeriod * kPeriod; ++code) {
      const Turns turns = {code % kPeriod, code / kPeriod % kPeriod, code / kPeriod / kPeriod};
      std::pair<int, int> cost = {0, turns[0] + turns[1] + turns[2]};
      bool possible = true;
      for (const int rank : sample) {
        const auto times = block_times(offsets, turns, ranks, rank);
        if (!times) {
          possible = false;
          break;
        }
        cost.first = std::max(cost.first, held_chunks(*times));
      }
      if (possible && (!best || cost < best_cost)) {
        best = VBlock{offsets, turns};
        best_cost = cost;
      }
    }
  }
  PENSTOCK_INVARIANT(best.has_value(), "some block of a V schedule is free of collisions");
  return *best;
}

}  // namespace

Schedule v_block_schedule(const PipelineShape& shape, std::span<const VBlockOffsets> candidates) {
  const int ranks = shape.ranks;
  const int stages = 2 * ranks;
  const VBlock block = best_block(candidates, ranks);
  Schedule schedule(StageMap::make(StagePlacement::V, ranks, stages, shape.microbatches));
  for (int rank = 0; rank < ranks; ++rank) {
    const BlockTimes times = *block_times(block.offsets, block.turns, ranks, rank);
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
        row.push(Action(stream.kind, stream.stage, microbatch));
      }
    }
  }
  return schedule;
}

}  // namespace penstock::schedule
