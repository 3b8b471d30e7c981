// What a rank holds after each instruction of its program, against sums by hand.
#include "penstock/train/plan/live_activations.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "penstock/generators.h"

namespace penstock::train {
namespace live_activations_test {

constexpr std::int64_t kBorder = 100;

std::vector<std::int64_t> peaks(schedule::ScheduleKind kind, int stages_per_rank, std::int64_t activation,
                                std::int64_t for_weights, bool knows_sent = true) {
  const schedule::Schedule schedule = executable(schedule::generate(
      kind, {.ranks = 2, .stages_per_rank = stages_per_rank, .microbatches = 4, .group_size = {}}));
  KeptActivations kept{.stages = {}, .border = kBorder, .knows_sent = knows_sent};
  for (int stage = 0; stage < 2 * stages_per_rank; ++stage) {
    plan::StageMemory memory;
    memory.activation = activation;
    memory.between_input_and_weight = for_weights;
    kept.stages.push_back(memory);
  }
  std::vector<std::int64_t> all;
  for (int rank = 0; rank < 2; ++rank)
    all.push_back(peak_of_activations(compile_program(schedule, rank), schedule.stages(), kept));
  return all;
}

// Rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3. At most two microbatches are in flight, with the output of the last
// forward, which is being sent, the gradient that B needs next, and the buffer of the one after it. Rank 1
// runs F0 B0 F1 B1 ...: one microbatch, whose input counts among what it keeps, and two inputs ahead.
TEST(LiveActivations, OfOneForwardOneBackward) {
  EXPECT_EQ(peaks(schedule::ScheduleKind::OneFOneB, 1, 1000, 0),
            (std::vector<std::int64_t>{2 * 1000 + 3 * kBorder, 1000 + 2 * kBorder}));
}

// A transport that does not tell when something has been sent. Rank 0 holds each output until its gradient
// has arrived: one more. Rank 1 holds all gradients that it has sent: one more with each microbatch, while
// the inputs ahead become fewer.
TEST(LiveActivations, WhatMayStillBeSentIsHeld) {
  EXPECT_EQ(peaks(schedule::ScheduleKind::OneFOneB, 1, 1000, 0, false),
            (std::vector<std::int64_t>{2 * 1000 + 4 * kBorder, 1000 + 3 * kBorder}));
}

// In one rank with both stages of a V, a hand-over costs nothing: with borders of no size only what stages
// keep counts, and what weights need is held from the first half of a backward to the second.
TEST(LiveActivations, HalvesOfABackward) {
  const std::vector<std::int64_t> little = peaks(schedule::ScheduleKind::ZBVZeroBubble, 2, 1000, 0),
                                  much = peaks(schedule::ScheduleKind::ZBVZeroBubble, 2, 1000, 5000);
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_GT(much[rank], little[rank] + 3000) << rank;
}

}  // namespace live_activations_test
}  // namespace penstock::train
