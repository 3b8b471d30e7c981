#include "penstock/plan/search/critical_swaps.h"

#include <cmath>
#include <random>
#include <utility>

#include "penstock/auto_schedule.h"
#include "penstock/validate.h"

namespace penstock::plan {

namespace {

using schedule::Action;
using schedule::Schedule;
using schedule::Slot;

// Relative slowdown that is still accepted at the beginning of the search.
constexpr double kFirstTolerance = 0.004;

bool may_change_places(Slot before, Slot after) {
  for (const Action& a : before) {
    for (const Action& b : after) {
      // F, I and W of one microbatch on one stage depend on each other; adjacent stages on one rank exchange
      // data.
      if (a.microbatch() == b.microbatch() && std::abs(a.stage() - b.stage()) <= 1) return false;
    }
  }
  return true;
}

struct Swap {
  int rank;
  std::size_t before;
  std::size_t after;
};

std::vector<Swap> critical_swaps(const Schedule& schedule, const Simulation& simulation) {
  std::vector<Swap> swaps;
  for (const CriticalAction& step : simulation.critical_path) {
    if (step.cause.kind != Cause::Kind::Previous) continue;
    const schedule::Row& row = schedule.row(step.rank);
    if (may_change_places(row[step.cause.slot], row[step.slot]))
      swaps.push_back({step.rank, step.cause.slot, step.slot});
  }
  return swaps;
}

}  // namespace

Schedule improve_by_swaps(const Schedule& schedule, const CostModel& model,
                          const std::vector<MemoryLimit>& limits, int trials, std::uint32_t seed) {
  std::mt19937 random(seed);
  Schedule current = schedule::without_idle(schedule);
  Simulation now = simulate(current, model);
  std::vector<Swap> swaps = critical_swaps(current, now);
  Schedule best = current;
  double best_time = now.time;
  for (int trial = 0; trial < trials && !swaps.empty(); ++trial) {
    const Swap swap = swaps[random() % swaps.size()];
    const double tolerance = kFirstTolerance * (1 - static_cast<double>(trial) / trials) *
                             static_cast<double>(random() % 1000) / 1000;
    current.row(swap.rank).swap_slots(swap.before, swap.after);
    bool accepted = false;
    try {
      Simulation next = simulate(current, model);
      accepted = next.time <= now.time * (1 + tolerance) && fits(next, limits);
      if (accepted) now = std::move(next);
    } catch (const schedule::ScheduleError&) {
      // Actions that take no time can form a cycle, which is not a valid order.
    }
    if (!accepted) {
      current.row(swap.rank).swap_slots(swap.before, swap.after);
      continue;
    }
    swaps = critical_swaps(current, now);
    if (now.time < best_time) {
      best_time = now.time;
      best = current;
    }
  }
  return best;
}

}  // namespace penstock::plan
