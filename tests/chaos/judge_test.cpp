// The judge of the fault campaign is given wrong outcomes, one at a time, and must refuse each.
#include "tests/chaos/judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "tests/has_text.h"

namespace penstock::test {
namespace judge_test {

using chaos::CommandEnd;
using chaos::End;
using chaos::Expectation;
using chaos::Outcome;
using chaos::Verdict;

constexpr int kSteps = 6;

chaos::Losses undisturbed() {
  chaos::Losses losses;
  for (int step = 1; step <= kSteps + 4; ++step) losses[step] = 5.0 / step + 0.1;
  return losses;
}

chaos::Losses whole_run() {
  chaos::Losses losses = undisturbed();
  losses.erase(losses.upper_bound(kSteps), losses.end());
  return losses;
}

// A rank was killed, the other named it, and the run was continued.
Outcome named_error() {
  Outcome outcome;
  outcome.struck = true;
  outcome.first = {
      {.name = "rank 0", .rank = 0, .exit_code = 1, .seconds = 2, .output = "penstock: rank 1 was lost"},
      {.name = "rank 1", .rank = 1, .hit = true, .exit_code = 137, .seconds = 0.1, .output = ""}};
  outcome.second = {{.name = "rank 0", .rank = 0, .seconds = 4, .output = ""},
                    {.name = "rank 1", .rank = 1, .seconds = 4, .output = ""}};
  outcome.losses = whole_run();
  outcome.newest_checkpoint = 4;
  outcome.continued_after = 4;
  return outcome;
}

Expectation expects_error() {
  Expectation expected;
  expected.must_fail = true;
  expected.culprits = {"rank 1"};
  expected.deadline_s = 10;
  return expected;
}

Outcome same_losses() {
  Outcome outcome;
  outcome.struck = true;
  outcome.first = {{.name = "the launcher", .seconds = 8, .output = "[launch] rank 1 failed first: SIGKILL"}};
  outcome.losses = whole_run();
  return outcome;
}

Expectation expects_losses() {
  Expectation expected;
  expected.must_finish = true;
  expected.deadline_s = 60;
  return expected;
}

Verdict verdict_on(const Outcome& outcome, const Expectation& expected) {
  return judge(outcome, expected, undisturbed(), kSteps);
}

// Exactly one complaint, which says this.
void expect_refused(const Outcome& outcome, const Expectation& expected, const std::string& because) {
  const Verdict verdict = verdict_on(outcome, expected);
  EXPECT_EQ(verdict.end, End::Wrong);
  EXPECT_EQ(verdict.problems.size(), 1u) << fmt::format("{}", fmt::join(verdict.problems, "\n"));
  if (!verdict.problems.empty()) {
    EXPECT_TRUE(has_text(verdict.problems.front(), because));
  }
}

TEST(Judge, AcceptsBothRightWays) {
  const Verdict error = verdict_on(named_error(), expects_error());
  EXPECT_EQ(error.end, End::NamedError) << fmt::format("{}", fmt::join(error.problems, "\n"));
  const Verdict losses = verdict_on(same_losses(), expects_losses());
  EXPECT_EQ(losses.end, End::SameLosses) << fmt::format("{}", fmt::join(losses.problems, "\n"));
}

TEST(Judge, RefusesAnotherLastBitOfALoss) {
  for (const auto& [step, loss] : whole_run()) {
    Outcome outcome = same_losses();
    outcome.losses[step] = std::nextafter(loss, std::numeric_limits<double>::infinity());
    expect_refused(outcome, expects_losses(), fmt::format("the loss of step {} is", step));
  }
}

TEST(Judge, RefusesZerosOfAnotherSign) {
  Outcome outcome = same_losses();
  chaos::Losses reference = undisturbed();
  reference[3] = 0.0;
  outcome.losses[3] = -0.0;
  EXPECT_EQ(judge(outcome, expects_losses(), reference, kSteps).end, End::Wrong);
  outcome.losses[3] = 0.0;
  EXPECT_EQ(judge(outcome, expects_losses(), reference, kSteps).end, End::SameLosses);
}

TEST(Judge, RefusesMissingAndFurtherSteps) {
  Outcome outcome = same_losses();
  outcome.losses.erase(2);
  outcome.losses.erase(5);
  expect_refused(outcome, expects_losses(), "no loss of steps 2, 5");
  outcome = same_losses();
  outcome.losses[kSteps + 1] = undisturbed().at(kSteps + 1);
  expect_refused(outcome, expects_losses(), fmt::format("a loss of step {}", kSteps + 1));
  // A run compared with nothing proves nothing.
  EXPECT_EQ(judge(same_losses(), expects_losses(), {}, kSteps).end, End::Wrong);
}

TEST(Judge, RefusesWhatIsLeftBehind) {
  Outcome outcome = same_losses();
  outcome.left_processes = {"4711 penstock train"};
  expect_refused(outcome, expects_losses(), "left running: 4711 penstock train");
  outcome = same_losses();
  outcome.left_memory = {"ucx_shm_posix_1"};
  expect_refused(outcome, expects_losses(), "left in /dev/shm: ucx_shm_posix_1");
  outcome = same_losses();
  outcome.left_temporary = {"penstock-train-abc"};
  expect_refused(outcome, expects_losses(), "left behind: penstock-train-abc");
  Expectation killed = expects_losses();
  killed.may_leave_temporary_files = true;
  EXPECT_EQ(verdict_on(outcome, killed).end, End::SameLosses);
}

TEST(Judge, RefusesALostCheckpoint) {
  Outcome outcome = named_error();
  outcome.lost_checkpoints = {"step-00000004: gone"};
  expect_refused(outcome, expects_error(), "checkpoint lost: step-00000004");
  // An older one was used although a newer one is intact.
  outcome = named_error();
  outcome.continued_after = 2;
  expect_refused(outcome, expects_error(),
                 "continued after step 2, although the checkpoint of step 4 was intact");
}

TEST(Judge, RefusesAnErrorThatNamesNobody) {
  for (const char* output :
       {"", "penstock: connection reset by peer", "penstock: rank 10 was lost", "penstock: rank 0 was lost",
        "[launch] summary: rank 1: exited with 1, after 3.1 s", "[rank 1] penstock: an error",
        "[launch] 1 rank still running: sending SIGTERM", "frank 1"}) {
    Outcome outcome = named_error();
    outcome.first[0].output = output;
    expect_refused(outcome, expects_error(), "rank 0 ended with 1 and named none of: rank 1");
  }
  for (const char* output :
       {"one line\n[rank 0] penstock: rank 1 was lost: its connection closed",
        "no status from rank 1 (stopped)", "[launch] rank 1 failed first: killed by SIGKILL after 3.2 s"}) {
    Outcome outcome = named_error();
    outcome.first[0].output = output;
    EXPECT_EQ(verdict_on(outcome, expects_error()).end, End::NamedError) << output;
  }
}

TEST(Judge, ARankDoesNotNameItself) {
  Expectation either = expects_error();
  either.culprits = {"rank 0", "rank 1"};
  Outcome outcome = named_error();
  outcome.first[0].output = "penstock: rank 0 failed";
  expect_refused(outcome, either, "rank 0 ended with 1 and named none of");
  // The prefix of a launcher says whose line it is.
  outcome.first[0] = {
      .name = "the launcher", .exit_code = 1, .seconds = 1, .output = "[rank 1] rank 1 failed"};
  expect_refused(outcome, either, "the launcher ended with 1 and named none of");
  outcome.first[0].output = "[rank 0] rank 1 failed";
  EXPECT_EQ(verdict_on(outcome, either).end, End::NamedError);
}

TEST(Judge, EverySurvivorHasToName) {
  Outcome outcome = named_error();
  outcome.first.push_back(
      {.name = "rank 2", .rank = 2, .exit_code = 1, .seconds = 2, .output = "penstock: timed out"});
  expect_refused(outcome, expects_error(), "rank 2 ended with 1 and named none of");
}

TEST(Judge, OneRankSpeaksForAllOnlyWhereItMay) {
  Outcome outcome = named_error();
  outcome.first.push_back({.name = "rank 2", .rank = 2, .exit_code = 3, .seconds = 2, .output = ""});
  expect_refused(outcome, expects_error(), "rank 2 ended with 3 and named none of");
  Expectation expected = expects_error();
  expected.one_names_for_all = true;
  EXPECT_EQ(verdict_on(outcome, expected).end, End::NamedError);
  outcome.first[0].output = "penstock: something";
  EXPECT_EQ(verdict_on(outcome, expected).end, End::Wrong);
  EXPECT_EQ(verdict_on(outcome, expected).problems.size(), 2u) << "neither of them named it";
}

TEST(Judge, RefusesTheDeadlinePassedAndProcessesThatHang) {
  Outcome outcome = named_error();
  outcome.first[0].seconds = 10.5;
  expect_refused(outcome, expects_error(), "rank 0 ended 10.5 s after the fault, expected at most 10.0 s");
  outcome = named_error();
  outcome.first[0].exit_code = CommandEnd::kStillRunning;
  expect_refused(outcome, expects_error(), "rank 0 still ran");
  // Also the process that was stopped and continued: it must not stay for good.
  outcome = named_error();
  outcome.first[1].exit_code = CommandEnd::kStillRunning;
  expect_refused(outcome, expects_error(), "rank 1 still ran");
  outcome = named_error();
  outcome.second[1].exit_code = CommandEnd::kStillRunning;
  expect_refused(outcome, expects_error(), "started again, rank 1 still ran");
}

TEST(Judge, RefusesCrashes) {
  for (const int code : {70, 134, 139}) {
    Outcome outcome = named_error();
    outcome.first[0].exit_code = code;
    expect_refused(outcome, expects_error(), "a defect or a crash");
  }
}

TEST(Judge, RefusesTheOtherWayWhereOnlyOneIsRight) {
  Outcome outcome = named_error();
  Expectation expected = expects_losses();
  expected.culprits = {"rank 1"};
  expect_refused(outcome, expected, "rank 0 ended with 1, expected to finish");
  expected = expects_error();
  expect_refused(same_losses(), expected, "it finished, although");
}

TEST(Judge, RefusesATrialThatTriedNothing) {
  Outcome outcome = same_losses();
  outcome.struck = false;
  expect_refused(outcome, expects_losses(), "over before the fault began");
  outcome = same_losses();
  outcome.first.clear();
  EXPECT_EQ(verdict_on(outcome, expects_losses()).end, End::Wrong);
}

TEST(Judge, RefusesARunThatCannotBeContinued) {
  Outcome outcome = named_error();
  outcome.second.clear();
  expect_refused(outcome, expects_error(), "it was not started again");
  outcome = named_error();
  outcome.second[0].exit_code = 2;
  expect_refused(outcome, expects_error(), "started again, rank 0 ended with 2");
}

TEST(Judge, RefusesSilenceAboutDamage) {
  Outcome outcome = same_losses();
  Expectation expected = expects_losses();
  expected.reports = {"model.safetensors"};
  expect_refused(outcome, expected, "nobody reported: model.safetensors");
  outcome.first[0].output =
      "checkpoint of step 8 skipped: model.safetensors bytes 0-100: the checksum differs";
  EXPECT_EQ(verdict_on(outcome, expected).end, End::SameLosses);
}

TEST(Judge, SilenceIsRightWhereNobodyIsLeft) {
  Outcome outcome = named_error();
  outcome.first = {{.name = "the launcher", .hit = true, .exit_code = 137, .seconds = 0, .output = ""}};
  Expectation expected = expects_error();
  expected.silent = true;
  EXPECT_EQ(verdict_on(outcome, expected).end, End::NamedError);
  outcome.left_processes = {"4711 penstock train --worker"};
  expect_refused(outcome, expected, "left running");
}

}  // namespace judge_test
}  // namespace penstock::test
