// The simulator against the published formulas of each schedule, at equal costs: F = I = W = 1, B = 2, free
// transfers.
#include <gtest/gtest.h>

#include <algorithm>

#include "penstock/lower.h"
#include "penstock/schedule/generate/virtual_pipeline.h"
#include "penstock/simulator.h"
#include "tests/plan/shapes.h"

namespace penstock::plan::test {
namespace simulator_formula_test {

using schedule::ScheduleKind;

constexpr double kTolerance = 1e-9;

Simulation at_equal_costs(ScheduleKind kind, int ranks, int chunks, int microbatches) {
  return simulate(generate(kind, shape(ranks, chunks, microbatches)), CostModel{});
}

// Idle time of the most idle rank; at equal costs without overlaps all ranks are equally idle.
double idle_time(const Simulation& simulation) {
  double most = 0;
  for (const RankSummary& rank : simulation.ranks) most = std::max(most, rank.idle);
  return most;
}

TEST(Formula, GPipeAnd1F1BIdleForPMinus1OfMPlusPMinus1) {
  for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::OneFOneB}) {
    for (const int p : {1, 2, 3, 4, 7, 8, 16}) {
      for (const int m : {p, p + 1, 2 * p + 3, 5 * p}) {
        const Simulation result = at_equal_costs(kind, p, 1, m);
        EXPECT_NEAR(result.bubble, static_cast<double>(p - 1) / (m + p - 1), kTolerance)
            << p << " ranks, " << m;
        EXPECT_NEAR(result.time, 3.0 * (m + p - 1), kTolerance);
      }
    }
  }
}

TEST(Formula, InterleavingDividesTheBubbleByTheChunks) {
  for (const int p : {2, 3, 4, 8}) {
    for (const int v : {1, 2, 3, 4}) {
      for (const int rounds : {1, 2, 5}) {
        const int m = rounds * p;
        const Simulation result = at_equal_costs(ScheduleKind::Interleaved1F1B, p, v, m);
        EXPECT_NEAR(result.bubble, static_cast<double>(p - 1) / (v * m + p - 1), kTolerance)
            << p << " " << v << " " << m;
        EXPECT_NEAR(result.bubble, schedule::bubble_share(p, v, m), kTolerance);
      }
    }
  }
}

// Idle time per rank over the whole step: (P-1)(F + I - W) for ZB1P against (P-1)(F + B) for 1F1B, once the
// pipeline is full (M a multiple of P, at least 2P).
TEST(Formula, Zb1pIdlesAThirdOf1F1B) {
  for (const int p : {2, 3, 4, 6, 8}) {
    for (const int rounds : {2, 3, 8}) {
      const int m = rounds * p;
      const double zero_bubble = idle_time(at_equal_costs(ScheduleKind::InterleavedZeroBubble, p, 1, m));
      const double one_f_one_b = idle_time(at_equal_costs(ScheduleKind::OneFOneB, p, 1, m));
      EXPECT_NEAR(one_f_one_b, 3.0 * (p - 1), kTolerance);
      EXPECT_NEAR(zero_bubble, one_f_one_b / 3, kTolerance) << p << " ranks, " << m << " microbatches";
    }
  }
}

TEST(Formula, ZbvNeverIdlesBetweenFirstAndLastAction) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int m : {2 * p - 1, 2 * p, 3 * p + 1, 6 * p}) {
      EXPECT_NEAR(at_equal_costs(ScheduleKind::ZBVZeroBubble, p, 2, m).span_bubble, 0, kTolerance)
          << p << " " << m;
    }
  }
}

TEST(Formula, Zb2pNeverIdlesBetweenFirstAndLastAction) {
  for (const int p : {2, 4, 8}) {
    for (const int m : {2 * p, 4 * p}) {
      EXPECT_NEAR(at_equal_costs(ScheduleKind::ZB2P, p, 1, m).span_bubble, 0, kTolerance) << p << " " << m;
    }
  }
}

// The table of the DualPipe repository: bubble time and activations of each method, PP = stages that a
// microbatch passes, F&B = time of an overlapped pair.
//
//   method     bubble                    activations
//   1F1B       (PP-1)(F+B)               PP
//   ZB1P       (PP-1)(F+B-2W)            PP
//   DualPipe   (PP/2-1)(F&B+B-3W)        PP+1
//   DualPipeV  (PP/2-1)(F&B+B-3W)        PP+1, on PP/2 ranks
TEST(Formula, DualPipeTable) {
  for (const double saving : {0.0, 0.5, 1.0}) {
    CostModel model;
    model.overlap_saving = saving;
    const double f = 1, w = 1, b = 2;
    const double pair = f + b - saving * std::min(f, b);
    for (const int p : {2, 4, 8}) {
      const int m = 4 * p;
      const auto run = [&](ScheduleKind kind, int chunks) {
        return simulate(generate(kind, shape(p, chunks, m)), model);
      };

      const Simulation one_f_one_b = run(ScheduleKind::OneFOneB, 1);
      EXPECT_NEAR(idle_time(one_f_one_b), (p - 1) * (f + b), kTolerance);
      EXPECT_EQ(one_f_one_b.peak_activations(), p);

      const Simulation zb1p = run(ScheduleKind::InterleavedZeroBubble, 1);
      EXPECT_NEAR(idle_time(zb1p), (p - 1) * (f + b - 2 * w), kTolerance);
      EXPECT_EQ(zb1p.peak_activations(), p);

      const Simulation dual = run(ScheduleKind::DualPipe, 2);
      EXPECT_EQ(dual.peak_activations(), p + 1);
      const Simulation dual_v = run(ScheduleKind::DualPipeV, 2);
      EXPECT_EQ(dual_v.peak_activations(), 2 * p + 1);
      // The rank with the most idle time; with hidden work the ranks have different numbers of overlapped
      // pairs.
      EXPECT_NEAR(idle_time(dual), (p / 2 - 1) * (pair + b - 3 * w), kTolerance) << p << " saving " << saving;
      EXPECT_NEAR(idle_time(dual_v), (p - 1) * (pair + b - 3 * w), kTolerance) << p << " saving " << saving;
    }
  }
}

TEST(Formula, BoundedMemoryOfTheVSchedules) {
  for (const int p : {4, 8, 16}) {
    const int m = 4 * p;
    // In units of one rank's share: two chunks make one.
    const double one_f_one_b = at_equal_costs(ScheduleKind::OneFOneB, p, 1, m).peak_activations();
    const double half = at_equal_costs(ScheduleKind::VHalf, p, 2, m).peak_activations() / 2.0;
    const double third = at_equal_costs(ScheduleKind::VMin, p, 2, m).peak_activations() / 2.0;
    EXPECT_EQ(one_f_one_b, p);
    EXPECT_LE(half, p / 2.0 + 1) << p;
    EXPECT_LE(third, p / 3.0 + 2) << p;
    EXPECT_LT(third, half + 1e-9) << p;
  }
}

TEST(Formula, LoweringCostsNothingWhenTransfersAreFree) {
  for (const Case& item : legal_cases({1, 2, 4}, {4, 8, 12})) {
    const schedule::Schedule compute = generate(item.kind, item.shape);
    const Simulation plain = simulate(compute, CostModel{});
    const Simulation lowered = simulate(schedule::lower(compute), CostModel{});
    EXPECT_NEAR(lowered.time, plain.time, kTolerance) << item.name();
    EXPECT_NEAR(lowered.bubble, plain.bubble, kTolerance) << item.name();
    EXPECT_EQ(lowered.peak_activations(), plain.peak_activations()) << item.name();
  }
}

}  // namespace simulator_formula_test
}  // namespace penstock::plan::test
