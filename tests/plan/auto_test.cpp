// `auto` on 200 seeded cases with uneven costs, and edge cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "penstock/auto_schedule.h"
#include "penstock/lower.h"
#include "penstock/plan/search/critical_swaps.h"
#include "penstock/validate.h"
#include "tests/plan/shapes.h"

namespace penstock::plan::test {
namespace auto_test {

using schedule::ScheduleKind;
using schedule::StagePlacement;
using ::testing::HasSubstr;

// 4 and 8 ranks, P to 4P microbatches, times from 0.5 to 1.5 per stage and kind, transfers up to 0.2, the
// memory of 1F1B.
AutoRequest uneven_case(unsigned seed) {
  std::mt19937 random(seed);
  const int ranks = seed % 2 == 0 ? 4 : 8;
  const int microbatches = ranks * (1 + static_cast<int>(seed / 2) % 4);
  AutoRequest request;
  request.shape = shape(ranks, 1, microbatches);
  request.model = random_costs(random, ranks, 0.5, 1.5);
  request.model.latency = std::uniform_real_distribution<double>(0, 0.2)(random);
  request.limits = one_f_one_b_limits(ranks, microbatches);
  request.trials = 100;
  return request;
}

TEST(Auto, NeverSlowerThanTheBestFixedAndOftenFaster) {
  constexpr int kCases = 200;
  int clearly_faster = 0;
  for (unsigned seed = 0; seed < kCases; ++seed) {
    const AutoRequest request = uneven_case(seed);
    const AutoResult result = auto_schedule(request);
    // Check the reported result independently with the simulator.
    const Simulation simulation = simulate(result.schedule, request.model);
    ASSERT_TRUE(fits(simulation, request.limits)) << "seed " << seed;
    double best_fixed = -1;
    for (const ScheduleKind kind : schedule::all_schedule_kinds()) {
      try {
        check_shape(kind, request.shape);
      } catch (const ValueError&) {
        continue;
      }
      const Simulation fixed = simulate(generate(kind, request.shape), request.model);
      if (fits(fixed, request.limits) && (best_fixed < 0 || fixed.time < best_fixed)) best_fixed = fixed.time;
    }
    ASSERT_GT(best_fixed, 0) << "1F1B itself fits";
    ASSERT_LE(simulation.time, best_fixed * (1 + 1e-12)) << "seed " << seed;
    if (best_fixed >= 1.03 * simulation.time) ++clearly_faster;
  }
  std::printf("at least 3 %% faster than the best fixed schedule in %d of %d cases\n", clearly_faster,
              kCases);
  EXPECT_GE(clearly_faster, kCases / 2);
}

TEST(Auto, IsDeterministicAndItsResultCanBeExecuted) {
  const AutoRequest request = uneven_case(3);
  const AutoResult first = auto_schedule(request);
  EXPECT_EQ(first.schedule, auto_schedule(request).schedule);
  EXPECT_TRUE(schedule::check(first.schedule).ok());
  EXPECT_TRUE(schedule::check(schedule::lower(first.schedule)).ok());
  EXPECT_EQ(first.best_fixed, ScheduleKind::OneFOneB);
}

TEST(CriticalSwaps, GiveFasterOrdersOfTheSameWorkWithinTheLimits) {
  int faster = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    const AutoRequest request = uneven_case(seed);
    const std::vector<MemoryLimit> limits = {{request.shape.ranks, std::nullopt}};
    const schedule::Schedule start = generate(ScheduleKind::InterleavedZeroBubble, request.shape);
    const schedule::Schedule improved = improve_by_swaps(start, request.model, limits, 200, seed);
    EXPECT_TRUE(schedule::check(improved).ok());
    EXPECT_EQ(improved.actions(), start.actions());
    const Simulation after = simulate(improved, request.model);
    EXPECT_TRUE(fits(after, limits));
    const double before = simulate(start, request.model).time;
    EXPECT_LE(after.time, before);
    if (after.time < before) ++faster;
  }
  EXPECT_GE(faster, 10);
}

TEST(ListScheduler, KeepsEveryLimitAndNeverLosesWork) {
  std::mt19937 random(21);
  for (int trial = 0; trial < 60; ++trial) {
    const int ranks = 1 + trial % 5;
    const int chunks = 1 + trial % 2;
    const auto placement = chunks == 2 && trial % 4 == 1 ? StagePlacement::V : StagePlacement::Loop;
    const auto map = schedule::StageMap::make(placement, ranks, ranks * chunks, 7);
    const CostModel model = random_costs(random, ranks * chunks, 0.2, 2);
    const std::vector<MemoryLimit> limits(static_cast<std::size_t>(ranks),
                                          {chunks + trial % 3, std::nullopt});
    std::vector<RankRule> rules(static_cast<std::size_t>(ranks));
    for (RankRule& rule : rules) {
      rule.in_flight = 1 + static_cast<int>(random() % 6);
      rule.forward_first = static_cast<int>(random() % 4);
      rule.patience = 0.5 * static_cast<double>(random() % 4);
      rule.open_weights = 1 + static_cast<int>(random() % 5);
    }
    const auto made = list_schedule(map, model, limits, rules);
    ASSERT_TRUE(made.has_value()) << "space for each later stage is always reserved";
    EXPECT_TRUE(schedule::check(made->schedule).ok());
    const Simulation simulation = simulate(made->schedule, model);
    EXPECT_NEAR(simulation.time, made->time, 1e-6) << "both agree on the time";
    EXPECT_TRUE(fits(simulation, limits));
  }
}

TEST(Auto, KeepsByteLimits) {
  AutoRequest request = uneven_case(5);
  request.model.memory = {
      {.parameters = 1000, .gradients = 500, .activation = 100, .between_input_and_weight = 40}};
  request.limits = {{std::nullopt, 1000 + 500 + 5 * 100}};
  const AutoResult result = auto_schedule(request);
  EXPECT_LE(result.simulation.peak_bytes(), 2000);
  request.limits = {{std::nullopt, 1000 + 500 + 3 * 100}};
  EXPECT_LE(auto_schedule(request).simulation.peak_bytes(), 1800);
}

TEST(Auto, UsesTwoStagesPerRankInEitherPlacement) {
  std::mt19937 random(9);
  AutoRequest request;
  request.shape = shape(4, 2, 8);
  request.model = random_costs(random, 8, 0.5, 1.5);
  request.limits = {{6, std::nullopt}};
  request.placements = {StagePlacement::V};
  request.trials = 60;
  const AutoResult only_v = auto_schedule(request);
  EXPECT_LE(only_v.simulation.peak_activations(), 6);
  EXPECT_EQ(only_v.schedule.stages().stage_to_rank(), (std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}));
  request.placements = {StagePlacement::Loop, StagePlacement::V};
  EXPECT_LE(auto_schedule(request).simulation.time, only_v.simulation.time + 1e-9);
}

TEST(Auto, WholeBackwardsWhereTheyAreCheaper) {
  AutoRequest request;
  request.shape = shape(2, 1, 8);
  request.model.stages = {{.forward = 1, .backward_input = 2, .backward_weight = 2, .backward = 2}};
  request.limits = one_f_one_b_limits(2, 8);
  const AutoResult result = auto_schedule(request);
  EXPECT_LE(result.simulation.time, 27.0 + 1e-9);  // 1F1B: (8 + 1) x 3
}

TEST(Auto, RefusesWhatCannotBeMet) {
  AutoRequest request = uneven_case(0);
  request.limits = {{0, std::nullopt}};
  try {
    auto_schedule(request);
    FAIL() << "no schedule can hold nothing";
  } catch (const ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("at least 1 activations"));
  }
  request = uneven_case(0);
  request.limits.resize(3);
  EXPECT_THROW(auto_schedule(request), ValueError);
  request = uneven_case(0);
  request.placements = {StagePlacement::V};
  EXPECT_THROW(auto_schedule(request), ValueError);
}

}  // namespace auto_test
}  // namespace penstock::plan::test
