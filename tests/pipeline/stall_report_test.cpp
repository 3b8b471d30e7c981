// The cause of a stall, given the places of the ranks.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "penstock/generators.h"
#include "penstock/pipeline/report/stall_report.h"
#include "tests/has_text.h"

namespace penstock {
namespace stall_report_test {

using State = RankPlace::State;
using test::has_text;

RankPlace place(int rank, State state, std::vector<int> waits_for = {}, std::uint64_t step = 4,
                double for_s = 3) {
  RankPlace made;
  made.state = state;
  made.rank = rank;
  made.step = step;
  made.for_s = for_s;
  made.waits_for = std::move(waits_for);
  if (state == State::Computing) made.instruction = "compute 1F2";
  return made;
}

void expect_cause(const std::vector<RankPlace>& places, StallCause::Kind kind, const std::vector<int>& ranks,
                  const std::vector<int>& held_up) {
  const StallCause cause = find_cause(places);
  EXPECT_EQ(to_text(cause.kind), to_text(kind));
  EXPECT_EQ(cause.ranks, ranks);
  EXPECT_EQ(cause.held_up, held_up);
}

TEST(StallCause, ARankThatComputesWhileAllWait) {
  expect_cause({place(0, State::Waiting, {1}), place(1, State::Computing), place(2, State::Waiting, {1})},
               StallCause::Kind::BusyRank, {1}, {0, 2});
  // Indirectly, through another rank.
  expect_cause({place(0, State::Waiting, {1}), place(1, State::Waiting, {2}), place(2, State::Waiting, {3}),
                place(3, State::Computing)},
               StallCause::Kind::BusyRank, {3}, {0, 1, 2});
  // Of two, the one that holds up more ranks.
  expect_cause(
      {place(0, State::Computing, {}, 4, 9), place(1, State::Waiting, {3}), place(2, State::Waiting, {3}),
       place(3, State::Computing, {}, 4, 1), place(4, State::Waiting, {0})},
      StallCause::Kind::BusyRank, {3}, {1, 2});
}

TEST(StallCause, ASilentRank) {
  expect_cause({place(0, State::Waiting, {1}), place(1, State::NoStatus), place(2, State::Waiting, {0})},
               StallCause::Kind::SilentRank, {1}, {0, 2});
}

TEST(StallCause, ARankThatCouldNotBeAskedIsNotToBlame) {
  RankPlace unasked = place(2, State::NoStatus);
  unasked.error = "the store does not answer";
  expect_cause({place(0, State::NoStatus), place(1, State::Waiting, {0}), unasked},
               StallCause::Kind::SilentRank, {0}, {1});
  EXPECT_EQ(to_text(unasked), "no status: the store does not answer");
}

TEST(StallCause, ALostRankCountsBeforeEverythingElse) {
  expect_cause({place(0, State::Waiting, {1}), place(1, State::Waiting, {0}), place(2, State::Lost),
                place(3, State::Waiting, {2})},
               StallCause::Kind::LostRank, {2}, {3});
}

TEST(StallCause, ACycle) {
  expect_cause({place(0, State::Waiting, {2}), place(1, State::Waiting, {2}), place(2, State::Waiting, {3}),
                place(3, State::Waiting, {1})},
               StallCause::Kind::Cycle, {2, 3, 1}, {0});
}

TEST(StallCause, ARankThatDoesNotComeToTheStep) {
  expect_cause({place(0, State::Agreeing), place(1, State::Agreeing), place(2, State::Between, {}, 3)},
               StallCause::Kind::AbsentRank, {2}, {0, 1});
  // A rank that is still in the previous step holds up the others as well.
  expect_cause({place(0, State::Agreeing), place(1, State::Agreeing), place(2, State::Computing, {}, 3)},
               StallCause::Kind::BusyRank, {2}, {0, 1});
}

TEST(StallCause, AReceiverThatIsNotDone) {
  expect_cause({place(0, State::Finishing, {1}), place(1, State::Computing), place(2, State::Finishing, {0})},
               StallCause::Kind::BusyRank, {1}, {0});
  expect_cause({place(0, State::Finishing, {1}), place(1, State::Finishing, {0})}, StallCause::Kind::Unknown,
               {}, {});
}

TEST(StallCause, AFailureOfTheRankItself) {
  RankPlace failed = place(1, State::Computing);
  failed.error = "out of memory";
  failed.own_error = true;
  const std::vector<RankPlace> places = {place(0, State::Waiting, {1}), failed,
                                         place(2, State::Waiting, {1})};
  expect_cause(places, StallCause::Kind::Failure, {1}, {0, 2});
  EXPECT_TRUE(
      has_text(make_stall_report(0, places).text(), "rank 1 failed and holds up ranks 0, 2: out of memory"));
}

TEST(StallReport, PlacesComeFromThePrograms) {
  const schedule::Schedule lowered =
      executable(schedule::generate(schedule::schedule_kind("1F1B"), {.ranks = 2, .microbatches = 3}));
  const Program program = compile_program(lowered, 1);
  const std::vector<int> ranks = {5, 8};
  constexpr std::int64_t kNow = 10'000'000'000;
  int awaits = 0;
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& each = program.instructions[i];
    const RankPlace place =
        place_of({.step = 2, .instruction = static_cast<std::int64_t>(i), .since_ns = kNow - 1'500'000'000},
                 program, ranks, kNow);
    EXPECT_EQ(place.rank, 8);
    EXPECT_EQ(place.step, 2u);
    EXPECT_DOUBLE_EQ(place.for_s, 1.5);
    EXPECT_EQ(place.stage, 1);
    EXPECT_EQ(place.microbatch.has_value(), each.action.has_microbatch());
    if (place.microbatch) {
      EXPECT_EQ(*place.microbatch, *each.action.microbatch());
    }
    EXPECT_EQ(place.kind, schedule::to_text(each.action.kind()));
    EXPECT_EQ(place.instruction, to_text(program, each));
    if (each.kind == Instruction::Kind::Await) {
      ++awaits;
      EXPECT_EQ(place.state, State::Waiting);
      EXPECT_EQ(place.waits_for, std::vector<int>{5});
    } else {
      EXPECT_EQ(place.state, State::Computing);
    }
    EXPECT_EQ(decode_place(encode_place(place)), place);
  }
  EXPECT_EQ(awaits, 3);
  const RankPlace finishing =
      place_of({.step = 2, .instruction = StepProgress::kFinishing}, program, ranks, kNow);
  EXPECT_EQ(finishing.state, State::Finishing);
  EXPECT_EQ(finishing.waits_for, std::vector<int>{5});
  EXPECT_EQ(place_of({.step = 2, .instruction = StepProgress::kAgreeing}, program, ranks, kNow).state,
            State::Agreeing);
  EXPECT_EQ(place_of({.step = 2, .instruction = StepProgress::kNone}, program, ranks, kNow).state,
            State::Between);
  // An index of another program.
  EXPECT_EQ(place_of({.step = 2, .instruction = 10'000}, program, ranks, kNow).state, State::Between);
}

TEST(StallReport, AnOverlappedUnitIsNamedAsAWhole) {
  const schedule::Schedule lowered = executable(schedule::generate(
      schedule::schedule_kind("DualPipeV"), {.ranks = 2, .stages_per_rank = 2, .microbatches = 8}));
  const Program program = compile_program(lowered, 0);
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    if (program.instructions[i].members < 2) continue;
    const RankPlace place =
        place_of({.step = 1, .instruction = static_cast<std::int64_t>(i)}, program, {0, 1}, 0);
    EXPECT_EQ(place.instruction, "compute " + schedule::to_text(program.instructions[i].action) + "|" +
                                     schedule::to_text(program.instructions[i + 1].action));
    return;
  }
  FAIL() << "no overlapped unit";
}

TEST(StallReport, UnreadableTextIsRejected) {
  for (const char* word : {"", "x", "{}", "[1]", R"({"state":"asleep","rank":0})", R"({"rank":"a"})"})
    EXPECT_FALSE(decode_place(word)) << word;
}

TEST(StallReport, TextAndJson) {
  RankPlace waiting = place(0, State::Waiting, {1});
  waiting.instruction = "await 0RECV_B0 (gradient of stage 1 to stage 0)";
  waiting.stage = 0, waiting.microbatch = 0, waiting.kind = "RECV_B";
  const StallReport report =
      make_stall_report(0, {waiting, place(1, State::NoStatus), place(2, State::Waiting, {1})});
  RankPlace gave_up = waiting;
  gave_up.error = "timed out";
  EXPECT_EQ(to_text(gave_up), to_text(waiting));  // every rank times out in the end; only the cause matters
  const std::string text = report.text();
  EXPECT_TRUE(has_text(text, "pipeline stalled, seen from rank 0"));
  EXPECT_TRUE(has_text(
      text, "rank 0  step 4, for 3.0 s: await 0RECV_B0 (gradient of stage 1 to stage 0), waits for rank 1"));
  EXPECT_TRUE(has_text(text, "rank 1  no status"));
  EXPECT_TRUE(has_text(text, "no status from rank 1, which is stopped or cut off and holds up ranks 0, 2"));
  const auto document = nlohmann::json::parse(report.to_json());
  EXPECT_EQ(document.at("cause").at("kind"), "silent rank");
  EXPECT_EQ(document.at("cause").at("ranks"), std::vector<int>{1});
  EXPECT_EQ(document.at("ranks").size(), 3u);
  EXPECT_EQ(document.at("ranks").at(0).at("waits_for"), std::vector<int>{1});
  EXPECT_EQ(document.at("ranks").at(0).at("kind"), "RECV_B");
  // Any bytes in an error leave it readable.
  RankPlace odd = place(0, State::Computing);
  odd.error = "bad \xff byte";
  EXPECT_TRUE(nlohmann::json::parse(make_stall_report(0, {odd}).to_json()).is_object());
  EXPECT_TRUE(decode_place(encode_place(odd)));
}

}  // namespace stall_report_test
}  // namespace penstock
