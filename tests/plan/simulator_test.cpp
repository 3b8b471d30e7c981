// The simulator against simple independent computations: time by relaxation, memory by checking every pair
// after every slot.
#include "penstock/simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/validate.h"
#include "tests/plan/shapes.h"

namespace penstock::plan::test {
namespace simulator_test {

using schedule::Action;
using schedule::ActionKind;
using schedule::Schedule;
using schedule::ScheduleKind;
using ::testing::HasSubstr;

constexpr double kTolerance = 1e-9;

// End of the last action: start times are increased until no action starts before its rank's previous slot
// has ended and its input has arrived.
double relaxed_time(const Schedule& schedule, const CostModel& model) {
  std::map<std::pair<int, std::size_t>, double> start;
  std::map<std::tuple<bool, int, int>, std::pair<int, std::size_t>> maker;  // forward?, stage, microbatch
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (std::size_t slot = 0; slot < schedule.row(rank).size(); ++slot) {
      start[{rank, slot}] = 0;
      for (const Action& action : schedule.row(rank)[slot]) {
        if (action.kind() == ActionKind::BackwardWeight) continue;
        maker[{action.kind() == ActionKind::Forward, action.stage(), *action.microbatch()}] = {rank, slot};
      }
    }
  }
  const auto end_of = [&](std::pair<int, std::size_t> place) {
    return start[place] + model.time_of(schedule.row(place.first)[place.second]);
  };
  double last = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto& [place, time] : start) {
      double earliest = place.second == 0 ? 0 : end_of({place.first, place.second - 1});
      for (const Action& action : schedule.row(place.first)[place.second]) {
        const int stage = action.stage();
        const bool is_forward = action.kind() == ActionKind::Forward;
        if (action.kind() == ActionKind::BackwardWeight) continue;
        if (is_forward ? schedule.stages().is_first(action.stage())
                       : schedule.stages().is_last(action.stage()))
          continue;
        const auto from = maker.at({is_forward, is_forward ? stage - 1 : stage + 1, *action.microbatch()});
        const bool remote = from.first != place.first;
        earliest = std::max(earliest, end_of(from) + (remote ? model.latency : 0));
      }
      if (earliest > time + 1e-12) {
        time = earliest;
        changed = true;
      }
      last = std::max(last, end_of(place));
    }
  }
  return last;
}

TEST(Simulator, TimeEqualsRelaxationForUnevenCosts) {
  std::mt19937 random(7);
  for (const Case& item : legal_cases({2, 3}, {3, 4, 8})) {
    const Schedule schedule = generate(item.kind, item.shape);
    CostModel model = random_costs(random, schedule.stages().stages(), 0.2, 3);
    model.latency = std::uniform_real_distribution<double>(0, 1)(random);
    model.overlap_saving = 0.25;
    EXPECT_NEAR(simulate(schedule, model).time, relaxed_time(schedule, model), kTolerance) << item.name();
  }
}

struct Held {
  int activations = 0;
  std::int64_t bytes = 0;
};

// The peak that a rank holds, by checking every (stage, microbatch) during every slot.
Held brute_force_peak(const Schedule& schedule, int rank, const CostModel& model) {
  struct Marks {
    int forward = -1, input = -1, weight = -1;  // slots
  };
  std::map<std::pair<int, int>, Marks> pairs;
  std::map<int, int> first_weight;
  const schedule::Row& row = schedule.row(rank);
  for (int slot = 0; slot < static_cast<int>(row.size()); ++slot) {
    for (const Action& action : row[static_cast<std::size_t>(slot)]) {
      if (!is_compute(action.kind())) continue;
      Marks& marks = pairs[{action.stage(), *action.microbatch()}];
      if (action.kind() == ActionKind::Forward) marks.forward = slot;
      if (produces_input_gradient(action.kind())) marks.input = slot;
      if (produces_weight_gradient(action.kind())) {
        marks.weight = slot;
        first_weight.try_emplace(action.stage(), slot);
      }
    }
  }
  Held peak;
  for (int slot = 0; slot < static_cast<int>(row.size()); ++slot) {
    Held now;
    for (const int stage : schedule.stages().stages_of(rank)) {
      now.bytes += model.memory_of(stage).parameters;
      if (first_weight.contains(stage) && first_weight[stage] <= slot)
        now.bytes += model.memory_of(stage).gradients;
    }
    for (const auto& [pair, marks] : pairs) {
      if (slot < marks.forward || slot > marks.weight) continue;
      ++now.activations;
      const StageMemory& memory = model.memory_of(pair.first);
      const std::int64_t after = memory.between_input_and_weight.value_or(memory.activation);
      if (slot < marks.input || marks.input == marks.weight) {
        now.bytes += memory.activation;
      } else if (slot == marks.input) {
        now.bytes += std::max(memory.activation, after);
      } else {
        now.bytes += after;
      }
    }
    peak.activations = std::max(peak.activations, now.activations);
    peak.bytes = std::max(peak.bytes, now.bytes);
  }
  return peak;
}

TEST(Simulator, MemoryEqualsABruteForceCount) {
  std::mt19937 random(11);
  std::uniform_int_distribution<std::int64_t> bytes(0, 1000);
  for (const Case& item : legal_cases({1, 2, 4}, {4, 8, 13})) {
    const Schedule schedule = generate(item.kind, item.shape);
    CostModel model;
    model.memory.clear();
    for (int stage = 0; stage < schedule.stages().stages(); ++stage) {
      StageMemory memory = {
          .parameters = bytes(random), .gradients = bytes(random), .activation = bytes(random)};
      if (bytes(random) < 700) memory.between_input_and_weight = bytes(random);
      model.memory.push_back(memory);
    }
    for (const Schedule& form : {schedule, schedule::lower(schedule)}) {
      const Simulation result = simulate(form, model);
      for (int rank = 0; rank < schedule.ranks(); ++rank) {
        const Held expected = brute_force_peak(form, rank, model);
        EXPECT_EQ(result.ranks[static_cast<std::size_t>(rank)].peak_activations, expected.activations)
            << item.name();
        EXPECT_EQ(result.ranks[static_cast<std::size_t>(rank)].peak_bytes, expected.bytes)
            << item.name() << " rank " << rank;
      }
    }
  }
}

TEST(Simulator, MemoryCurveEndsWithParametersAndGradients) {
  CostModel model;
  model.memory = {{.parameters = 100, .gradients = 40, .activation = 7}};
  const Simulation result =
      simulate(generate(ScheduleKind::OneFOneB, shape(2, 1, 4)), model, {.memory_curve = true});
  for (const auto& curve : result.memory_curve) {
    EXPECT_EQ(curve.front().bytes, 100);
    EXPECT_EQ(curve.back().bytes, 140);
    EXPECT_EQ(curve.back().activations, 0);
    EXPECT_TRUE(std::is_sorted(curve.begin(), curve.end(),
                               [](const auto& a, const auto& b) { return a.time < b.time; }));
  }
  EXPECT_EQ(result.peak_bytes(), 100 + 40 + 2 * 7);
}

TEST(Simulator, UnshardedParametersCountBetweenUnshardAndReshard) {
  CostModel model;
  model.memory = {{.parameters = 10, .unsharded = 90}};
  const Schedule compute = generate(ScheduleKind::Interleaved1F1B, shape(1, 4, 1));
  const auto peak = [&](int active) {
    schedule::LowerOptions options;
    options.max_active_stages = active;
    return simulate(schedule::lower(compute, options), model).peak_bytes();
  };
  EXPECT_EQ(peak(1), 40 + 90);
  EXPECT_EQ(peak(2), 40 + 2 * 90);
  EXPECT_EQ(peak(4), 40 + 4 * 90);
}

TEST(Simulator, GatheringRunsBesideComputationUnlessBlocking) {
  const Schedule schedule =
      schedule::parse_schedule("0UNSHARD,1UNSHARD,0F0,1F0,1B0,0B0,1REDUCE_GRAD,0REDUCE_GRAD\n");
  CostModel model;
  model.stages = {{.unshard = 1, .reduce_grad = 1}};
  // 0UNSHARD 0-1, 1UNSHARD 1-2 beside 0F0 1-2, then 1F0 2-3, 1B0 3-5, 0B0 5-7; reductions 7-8 and 8-9.
  EXPECT_DOUBLE_EQ(simulate(schedule, model).time, 9);
  model.communication = Communication::Blocking;
  EXPECT_DOUBLE_EQ(simulate(schedule, model).time, 10);
}

// Two ranks, one microbatch: 0F0 | transfer | 1F0 1B0 | transfer | 0B0.
TEST(Simulator, TransfersTakeLatencyAndBandwidth) {
  const Schedule schedule = generate(ScheduleKind::GPipe, shape(2, 1, 1));
  CostModel model;
  model.latency = 0.5;
  model.stages = {{.output_bytes = 100}};
  model.bandwidth = 50;
  EXPECT_DOUBLE_EQ(simulate(schedule, model).time, 3 + 3 + 2 * 2.5);
  EXPECT_DOUBLE_EQ(simulate(schedule::lower(schedule), model).time, 11);
  model.communication = Communication::Blocking;
  EXPECT_DOUBLE_EQ(simulate(schedule::lower(schedule), model).time, 11);
}

TEST(Simulator, TransfersOnOneCommunicatorShareItsBandwidth) {
  const Schedule schedule = schedule::parse_schedule("0F0,0F1,0F2\n1F0,1F1,1F2\n");
  CostModel model;
  model.stages = {{.output_bytes = 4}};
  model.bandwidth = 1;
  // They leave at 1, 5 and 9 and arrive 4 later.
  EXPECT_DOUBLE_EQ(simulate(schedule, model).time, 14);
  model.bandwidth = std::numeric_limits<double>::infinity();
  model.latency = 4;  // latencies overlap: arrivals at 5, 6, 7
  EXPECT_DOUBLE_EQ(simulate(schedule, model).time, 8);
}

TEST(Simulator, BlockingIsNeverFasterThanOverlapped) {
  std::mt19937 random(3);
  for (const Case& item : legal_cases({2, 4}, {4, 8})) {
    const Schedule compute = generate(item.kind, item.shape);
    CostModel model = random_costs(random, compute.stages().stages(), 0.5, 2);
    model.latency = 0.2;
    const Schedule lowered = schedule::lower(compute);
    const double implied = simulate(compute, model).time;
    const double overlapped = simulate(lowered, model).time;
    model.communication = Communication::Blocking;
    EXPECT_LE(implied, overlapped + kTolerance) << item.name();
    EXPECT_LE(overlapped, simulate(lowered, model).time + kTolerance) << item.name();
    EXPECT_LE(implied, simulate(compute, model).time + kTolerance) << item.name();
  }
}

TEST(Simulator, EveryGeneratedScheduleSimulatesInEveryForm) {
  for (const Case& item : legal_cases({1, 2, 3, 4, 5, 8}, {1, 2, 3, 5, 8, 16, 17})) {
    const Schedule compute = generate(item.kind, item.shape);
    schedule::LowerOptions deferred;
    deferred.defer_receives = true;
    CostModel model;
    model.latency = 0.1;
    EXPECT_GT(simulate(compute, model).time, 0) << item.name();
    EXPECT_GT(simulate(schedule::lower(compute, deferred), model).time, 0) << item.name();
    model.communication = Communication::Blocking;
    EXPECT_GT(simulate(schedule::lower(compute), model).time, 0) << item.name();
  }
}

TEST(Simulator, CriticalPathIsAChainFromTheBeginningToTheEnd) {
  std::mt19937 random(5);
  for (const Case& item : legal_cases({2, 4}, {4, 8})) {
    const Schedule compute = generate(item.kind, item.shape);
    CostModel model = random_costs(random, compute.stages().stages(), 0.5, 2);
    model.latency = 0.1;
    for (const Schedule& form : {compute, schedule::lower(compute)}) {
      const Simulation result = simulate(form, model);
      ASSERT_FALSE(result.critical_path.empty());
      EXPECT_EQ(result.critical_path.front().cause.kind, Cause::Kind::Begin) << item.name();
      EXPECT_DOUBLE_EQ(result.critical_path.back().end, result.time) << item.name();
      EXPECT_DOUBLE_EQ(result.critical_path.front().start, 0);
      for (std::size_t i = 1; i < result.critical_path.size(); ++i) {
        const CriticalAction& now = result.critical_path[i];
        const CriticalAction& before = result.critical_path[i - 1];
        EXPECT_EQ(now.cause.rank, before.rank);
        EXPECT_EQ(now.cause.slot, before.slot);
        // Both sides of a transfer have the same times; any other action starts when the previous one has
        // ended, or one transfer later.
        if (now.cause.kind == Cause::Kind::Peer) continue;
        EXPECT_GE(now.start, before.end - model.latency - kTolerance) << item.name();
        EXPECT_LE(now.start, before.end + model.latency + kTolerance) << item.name();
      }
    }
  }
}

TEST(Simulator, StallNamesTheCycle) {
  const Schedule crossed = schedule::parse_schedule("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n");
  try {
    simulate(crossed, CostModel{});
    FAIL() << "a deadlocked schedule must not simulate";
  } catch (const schedule::ScheduleError& error) {
    EXPECT_EQ(error.report().cycle.size(), 2U) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("waits for"));
  }
}

TEST(Simulator, RefusesInconsistentSchedules) {
  CostModel two;
  two.stages = {{}, {}};
  EXPECT_THROW(simulate(generate(ScheduleKind::GPipe, shape(4, 1, 4)), two), ValueError);
  CostModel negative;
  negative.stages = {{.forward = -1}};
  EXPECT_THROW(simulate(generate(ScheduleKind::GPipe, shape(2, 1, 2)), negative), ValueError);
  // Stage 0 acts on two ranks.
  const Schedule wandering = schedule::parse_schedule("0F0,0B0\n0F1,0B1\n");
  EXPECT_THROW(simulate(wandering, CostModel{}), schedule::ScheduleError);
  // A send without a receive, and a receive of another microbatch.
  EXPECT_THROW(simulate(schedule::parse_schedule("0F0,0SEND_F0\n1F0\n"), CostModel{}),
               schedule::ScheduleError);
  EXPECT_THROW(simulate(schedule::parse_schedule("0F0,0F1,0SEND_F0\n1RECV_F1,1F1\n"), CostModel{}),
               schedule::ScheduleError);
}

TEST(Simulator, WaitsAreNamed) {
  const Schedule schedule = generate(ScheduleKind::OneFOneB, shape(2, 1, 2));
  CostModel model;
  model.latency = 0.1;
  const Simulation result = simulate(schedule, model);
  const TimedSlot& first_on_last_rank = result.slots[1][schedule.row(1)[0].empty() ? 1 : 0];
  EXPECT_EQ(waited_for(schedule, result, first_on_last_rank.cause, first_on_last_rank.start),
            "0F0 on rank 0, ended at 1, arrived at 1.1");
}

}  // namespace simulator_test
}  // namespace penstock::plan::test
