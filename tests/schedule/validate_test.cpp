// The validator finds injected faults, reports their place, and accepts every valid schedule.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/schedule/check/dry_run.h"
#include "penstock/validate.h"

namespace penstock::schedule {
namespace validate_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

Report report_of(const char* csv, ValidateOptions options = {}) {
  return check(parse_schedule(csv), options);
}

void expect_first(const char* csv, ViolationKind kind, const char* words) {
  const Report report = report_of(csv);
  ASSERT_FALSE(report.ok()) << csv;
  EXPECT_EQ(report.violations[0].kind, kind) << report.text();
  EXPECT_THAT(report.text(), HasSubstr(words));
}

PipelineShape small_shape(ScheduleKind kind) {
  PipelineShape shape;
  shape.ranks = 4;
  shape.stages_per_rank = required_stages_per_rank(kind).value_or(2);
  shape.microbatches = 8;
  return shape;
}

TEST(Validate, FindsPlantedFaultsOfEachKind) {
  expect_first("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", ViolationKind::Missing,
               "stage 0 on rank 0 does not run B or I for microbatch 1");
  expect_first("0F0,0F0,0B0\n1F0,1B0\n", ViolationKind::Duplicate, "0F0 at rank 0, slot 1");
  expect_first("0F0,0B0,0I0,0W0\n1F0,1B0\n", ViolationKind::Duplicate, "0I0 at rank 0, slot 2");
  expect_first("0B0,0F0\n1F0,1B0\n", ViolationKind::Order, "needs the forward of the same microbatch");
  expect_first("0F0,0W0,0I0\n1F0,1B0\n", ViolationKind::Order, "needs the I of the same microbatch");
  expect_first("0F0,1F0,0B0,1B0\n1F0,1B0\n", ViolationKind::WrongRank, "stage 1 belongs to rank 0");
  expect_first("0F,0B0\n1F0,1B0\n", ViolationKind::Malformed, "needs a microbatch");
  expect_first("0F0,0B0,0REDUCE_GRAD2\n1F0,1B0\n", ViolationKind::Malformed, "takes no microbatch");
  expect_first("0F0,(0B0;0SEND_F0)OVERLAP_F_B\n1F0,1B0\n", ViolationKind::Malformed, "members of an overlap");
  expect_first("(0F0;1F0)OVERLAP_F_B,1B0,0B0\n", ViolationKind::Order,
               "needs the activation of the previous stage");
  expect_first("0UNSHARD,0F0,0RESHARD,0B0\n1UNSHARD,1F0,1B0\n", ViolationKind::Sharding, "not gathered");
  expect_first("0UNSHARD,0UNSHARD,0F0,0B0\n1UNSHARD,1F0,1B0\n", ViolationKind::Sharding, "already gathered");
  expect_first("0RESHARD,0F0,0B0\n1F0,1B0\n", ViolationKind::Sharding, "not gathered");
  expect_first("0F0,0REDUCE_GRAD,0B0\n1F0,1B0,1REDUCE_GRAD\n", ViolationKind::Sharding,
               "0 of 1 weight gradients");
  expect_first("0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", ViolationKind::Missing, "1REDUCE_GRAD is missing");
}

TEST(Validate, FindsFaultsOfTransfers) {
  const char* good = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
  EXPECT_TRUE(report_of(good).ok());
  expect_first("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", ViolationKind::Missing,
               "does not run SEND_F for microbatch 0");
  expect_first("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", ViolationKind::Order,
               "needs the forward");
  expect_first("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", ViolationKind::Order,
               "gradient of the next stage");
  expect_first("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", ViolationKind::Duplicate,
               "slot 2");
  expect_first("0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
               ViolationKind::TransferOrder, "no stage on the other side");
  expect_first(
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1\n",
      ViolationKind::TransferOrder, "rank 0, slot 1 (0SEND_F0) is paired with rank 1, slot 0 (1RECV_F1)");
}

TEST(Validate, FindsTheCrossRankDeadlockOfAComputeSchedule) {
  const Report report = report_of("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n");
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.violations[0].kind, ViolationKind::Deadlock);
  ASSERT_EQ(report.cycle.size(), 2u);
  EXPECT_EQ(report.cycle[0].at, (Place{0, 1}));
  EXPECT_EQ(to_text(report.cycle[0].action), "0B0");
  EXPECT_EQ(report.cycle[0].needs_at, (Place{1, 2}));
  EXPECT_EQ(report.cycle[1].at, (Place{1, 0}));
  EXPECT_EQ(report.cycle[1].needs_at, (Place{0, 2}));
  EXPECT_THAT(report.grid,
              AllOf(HasSubstr(">0B0<"), HasSubstr("[0F1]"), HasSubstr(">1F1<"), HasSubstr("[1B0]")));
  EXPECT_THROW(dry_run(parse_schedule("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")), ScheduleError);
  EXPECT_THROW(lower(parse_schedule("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")), ScheduleError);
}

// Two ranks that both send first: valid if sends are only posted, a deadlock if they block.
TEST(Validate, DistinguishesBlockingFromPostedSends) {
  const char* csv =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
  const Report blocking = report_of(csv);
  ASSERT_FALSE(blocking.ok());
  EXPECT_EQ(blocking.violations[0].kind, ViolationKind::Deadlock);
  ASSERT_EQ(blocking.cycle.size(), 2u);
  EXPECT_EQ(to_text(blocking.cycle[0].action), "0SEND_F1");
  EXPECT_EQ(to_text(blocking.cycle[1].action), "1SEND_B0");
  ValidateOptions posted;
  posted.sends = SendModel::Posted;
  EXPECT_TRUE(report_of(csv, posted).ok());
}

TEST(Validate, ReportsTheCycleOnly) {
  // Ranks 3 and 4 wait for each other; the other ranks wait for them.
  const char* csv =
      "0F0,0F1,5F1,5F0,5B0,5B1,0B0,0B1\n"
      "1F0,1F1,6F1,6F0,6B0,6B1,1B0,1B1\n"
      "2F0,2F1,7F0,7F1,7B0,7B1,2B0,2B1\n"
      "3F0,3B0,3F1,8F0,8F1,8B0,8B1,3B1\n"
      "4F1,4F0,9F0,9F1,9B0,9B1,4B0,4B1\n";
  const Report report = report_of(csv);
  ASSERT_FALSE(report.ok());
  ASSERT_EQ(report.cycle.size(), 2u) << report.text();
  EXPECT_EQ(report.cycle[0].at, (Place{3, 1}));
  EXPECT_EQ(report.cycle[1].at, (Place{4, 0}));
}

// Rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0; and with the other member of its
// overlap it waits for rank 1 directly.
TEST(Validate, ReportsTheShortestOfSeveralCycles) {
  const Report report = report_of(
      "0F1,(3F0;0B1)OVERLAP_F_B,0F0,3F1,3B0,3B1,0B0\n"
      "1F0,1F1,4F0,4F1,4B0,4B1,1B0,1B1\n"
      "2F0,2F1,5F0,5F1,5B0,5B1,2B0,2B1\n");
  ASSERT_FALSE(report.ok());
  ASSERT_EQ(report.cycle.size(), 2u) << report.text();
  EXPECT_EQ(to_text(report.cycle[0].action), "0B1");
  EXPECT_EQ(report.cycle[1].at, (Place{1, 0}));
}

TEST(Validate, ReportsALongCycleWhole) {
  // Rank 0 begins with its second stage, whose input has to pass through all ranks first.
  const Report report = report_of("3F0,0F0,3B0,0B0\n1F0,4F0,4B0,1B0\n2F0,5F0,5B0,2B0\n");
  ASSERT_FALSE(report.ok());
  ASSERT_EQ(report.cycle.size(), 3u) << report.text();
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(report.cycle[i].needs_at.rank, report.cycle[(i + 1) % 3].at.rank);
    EXPECT_GE(report.cycle[i].needs_at.slot, report.cycle[(i + 1) % 3].at.slot);
  }
}

TEST(Validate, ComparesWithWhatTheCallerExpects) {
  ValidateOptions options;
  options.expected = ValidateOptions::Extent{2, 2, 2};
  const Report report = report_of("0F0,0B0\n1F0,1B0\n", options);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.violations[0].kind, ViolationKind::Extent);
}

TEST(Validate, RefusesSparseNumbersWithoutSpendingMemory) {
  std::string csv = "0F1000000000,0B1000000000";
  for (int i = 0; i < 40; ++i) csv += fmt::format(",{}F0", i);
  const Schedule sparse = parse_schedule(csv);
  EXPECT_EQ(check(sparse).violations.at(0).kind, ViolationKind::Missing);
  EXPECT_THROW(lower(sparse), ScheduleError);
  EXPECT_THROW(dry_run(sparse), ScheduleError);
}

TEST(Validate, StopsAtTheGivenNumberOfViolations) {
  std::string csv;
  for (int i = 0; i < 100; ++i) csv += fmt::format("{}0B{}", i == 0 ? "" : ",", i);
  ValidateOptions options;
  options.max_violations = 5;
  EXPECT_EQ(check(parse_schedule(csv), options).violations.size(), 5u);
}

TEST(Validate, ChainsCallsAndThrowsWithTheReport) {
  PipelineShape shape;
  shape.ranks = 2;
  shape.microbatches = 4;
  EXPECT_NO_THROW(lower(validate(one_f_one_b(shape))));
  try {
    validate(parse_schedule("0F0\n"));
    FAIL();
  } catch (const ScheduleError& error) {
    EXPECT_FALSE(error.report().ok());
    EXPECT_THAT(error.what(), HasSubstr("cannot be executed"));
  }
}

// Faults injected into every kind of schedule, at every slot: dropping or duplicating an action is always
// found; swapping two adjacent actions is found, or the result still runs.
TEST(Validate, FindsDroppedDoubledAndSwappedActionsEverywhere) {
  for (const ScheduleKind kind : all_schedule_kinds()) {
    SCOPED_TRACE(to_text(kind));
    const Schedule good = generate(kind, small_shape(kind));
    for (const Schedule& schedule : {without_idle(good), lower(good)}) {
      ASSERT_TRUE(check(schedule).ok());
      for (int rank = 0; rank < schedule.ranks(); rank += 3) {
        const Row& row = schedule.row(rank);
        for (std::size_t at = 0; at < row.size(); ++at) {
          Schedule dropped = schedule;
          dropped.row(rank).replace_idle(at);
          // RESHARD at the very end of a row may be missing: the step is over.
          const bool may_miss = row[at][0].kind() == ActionKind::Reshard;
          if (!may_miss) {
            EXPECT_FALSE(check(dropped).ok()) << "dropped " << to_text(row[at]);
          }
          Schedule doubled(schedule.stages());
          for (int other = 0; other < schedule.ranks(); ++other) {
            for (std::size_t i = 0; i < schedule.row(other).size(); ++i) {
              doubled.row(other).push_slot(schedule.row(other)[i]);
              if (other == rank && i == at) doubled.row(other).push_slot(schedule.row(other)[i]);
            }
          }
          EXPECT_FALSE(check(doubled).ok()) << "doubled " << to_text(row[at]);
          if (at + 1 < row.size()) {
            Schedule swapped = schedule;
            swapped.row(rank).swap_slots(at, at + 1);
            if (check(swapped).ok()) {
              EXPECT_NO_THROW(dry_run(swapped));
            }
          }
        }
      }
    }
  }
}

}  // namespace validate_test
}  // namespace penstock::schedule
