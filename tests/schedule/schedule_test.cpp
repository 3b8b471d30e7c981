// Schedule values, text form, placement, names, shapes and the arithmetic of the virtual pipeline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/schedule/generate/virtual_pipeline.h"
#include "tests/throws.h"

namespace penstock::schedule {
namespace schedule_test {

using test::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

PipelineShape shape(int ranks, int stages_per_rank, int microbatches) {
  PipelineShape result;
  result.ranks = ranks;
  result.stages_per_rank = stages_per_rank;
  result.microbatches = microbatches;
  return result;
}

TEST(Action, HoldsItsPartsInEightBytes) {
  const Action action(ActionKind::RecvBackward, kMaxStage, kMaxMicrobatch);
  EXPECT_EQ(sizeof action, 8u);
  EXPECT_EQ(action.kind(), ActionKind::RecvBackward);
  EXPECT_EQ(action.stage(), kMaxStage);
  EXPECT_EQ(action.microbatch(), kMaxMicrobatch);
  EXPECT_EQ(Action(ActionKind::Unshard, 3).microbatch(), std::nullopt);
  EXPECT_NE(Action(ActionKind::Forward, 3), forward(3, 0));
  EXPECT_THROW(forward(-1, 0), ValueError);
  EXPECT_THROW(forward(0, -1), ValueError);
  EXPECT_THROW(forward(kMaxStage + 1, 0), ValueError);
}

TEST(ActionText, EveryKindRoundTrips) {
  for (int kind = 0; kind < kActionKinds; ++kind) {
    const Action with(static_cast<ActionKind>(kind), 12, 3);
    const Action without(static_cast<ActionKind>(kind), 7);
    EXPECT_EQ(parse_action(to_text(with)), with) << to_text(with);
    EXPECT_EQ(parse_action(to_text(without)), without) << to_text(without);
  }
  EXPECT_EQ(to_text(parse_cell("( 0F4 ;3B1 )OVERLAP_F_B")), "(0F4;3B1)OVERLAP_F_B");
  EXPECT_EQ(to_text(parse_action(" 007SEND_F01 ")), "7SEND_F1");
}

TEST(ActionText, MatchesAsAWhole) {
  for (const char* bad : {"2F0junk",
                          "F0",
                          "2",
                          "2X0",
                          "2f0",
                          "-1F0",
                          "2F-1",
                          "2 F0",
                          "2F 0",
                          "(0F1)OVERLAP_F_B",
                          "()OVERLAP_F_B",
                          "(0F1;3B0)",
                          "(0F1;3B0)OVERLAP_F_Bx",
                          "(0F1;3B0) OVERLAP_F_B",
                          "(0F1;;3B0)OVERLAP_F_B",
                          "(0F1,3B0)OVERLAP_F_B",
                          "((0F1;1F1)OVERLAP_F_B;3B0)OVERLAP_F_B",
                          "2OVERLAP_F_B",
                          "99999999999F0",
                          "0F99999999999",
                          "16777216F0",
                          "2F0;",
                          "2F0 3F0",
                          "2F0\n3F0",
                          "\"2F0\""}) {
    EXPECT_THROW(parse_cell(bad), ConfigError) << bad;
  }
}

TEST(ScheduleText, ErrorsNameLineAndColumn) {
  EXPECT_THAT(message_of<ConfigError>([] { parse_rows("0F0,0B0\n1F0,1F1junk\n"); }),
              AllOf(HasSubstr("line 2, column 8"), HasSubstr("junk")));
  EXPECT_THAT(message_of<ConfigError>([] { parse_rows("0F0\n\n, 3Q1"); }), HasSubstr("line 3, column 4"));
}

TEST(ScheduleText, KeepsRowsOfDifferentLengthAndIdleSlots) {
  for (const char* csv :
       {"0F0,,0B0\n,1F0,1B0,,\n", "0F0\n\n1F0\n", " \n0F0\n", ",\n0F0\n", "(0F0;1B2;1F3)OVERLAP_F_B\n"}) {
    EXPECT_EQ(to_csv(parse_rows(csv)), csv);
  }
  EXPECT_EQ(parse_rows("0F0,\r\n1F0").size(), 2u);
  EXPECT_EQ(parse_rows("0F0,\r\n1F0")[0].size(), 2u);
  EXPECT_TRUE(parse_rows("").empty());
}

TEST(ScheduleText, CommentsAndAByteOrderMarkAreSkipped) {
  const std::vector<Row> rows = parse_rows("0F0,0B0\n1F0,1B0\n");
  EXPECT_EQ(parse_rows("\xef\xbb\xbf"
                       "0F0,0B0\n1F0,1B0\n"),
            rows);
  EXPECT_EQ(parse_rows("# two ranks\n0F0,0B0\n  # the second\n1F0,1B0  # ends here\r\n#"), rows);
  EXPECT_EQ(parse_rows("\xef\xbb\xbf# Excel\r\n0F0,0B0\r\n1F0,1B0\r\n"), rows);
  EXPECT_EQ(parse_rows("0F0\n\n").size(), 2u) << "an empty line is a rank, a comment is not";
  EXPECT_THAT(message_of<ConfigError>([] { parse_rows("# one\n# two\n0F0,0Q0\n"); }),
              HasSubstr("line 3, column 6"));
  EXPECT_THROW(parse_rows("0F0\xef\xbb\xbf\n"), ConfigError) << "a byte order mark must come first";
}

TEST(ScheduleText, LimitsAreEnforced) {
  TextLimits limits;
  limits.bytes = 8;
  EXPECT_THROW(parse_rows("0F0,0F1,0F2", limits), ConfigError);
  limits = {};
  limits.ranks = 2;
  EXPECT_THROW(parse_rows("0F0\n1F0\n2F0\n", limits), ConfigError);
  limits = {};
  limits.slots_per_rank = 2;
  EXPECT_THROW(parse_rows("0F0,0F1,0F2", limits), ConfigError);
  limits = {};
  limits.microbatch = 9;
  EXPECT_THROW(parse_rows("0F10", limits), ConfigError);
  limits = {};
  limits.overlap_members = 2;
  EXPECT_THROW(parse_rows("(0F0;1F0;2F0)OVERLAP_F_B", limits), ConfigError);
}

TEST(ScheduleText, PlacementIsReadOffOrGiven) {
  EXPECT_THAT(parse_schedule("0F0,3F0\n1F0,2F0\n").stages().stage_to_rank(), ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(parse_schedule("1F0\n0F0\n").stages().stage_to_rank(), ElementsAre(1, 0));
  EXPECT_THAT(parse_schedule("1F0\n0F0\n", StagePlacement::Loop).stages().stage_to_rank(), ElementsAre(0, 1));
  EXPECT_THROW(parse_schedule("0F0,2F0\n"), ConfigError);
  EXPECT_THROW(parse_schedule(",,\n"), ConfigError);
  EXPECT_THROW(parse_schedule("16000000F0\n"), ConfigError) << "must not allocate a table of that size";
}

TEST(StagePlacement, PartialLastLegOfAVCanBeAllowed) {
  EXPECT_THROW(stage_to_rank(StagePlacement::V, 3, 7), ValueError);
  EXPECT_THAT(stage_to_rank(StagePlacement::V, 3, 7, PartialLeg::Allow), ElementsAre(0, 1, 2, 2, 1, 0, 0));
  EXPECT_THAT(stage_to_rank(StagePlacement::V, 4, 6, PartialLeg::Allow), ElementsAre(0, 1, 2, 3, 3, 2));
  EXPECT_THAT(rank_to_stages(StagePlacement::V, 3, 4, PartialLeg::Allow),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2, 3)));
  EXPECT_THROW(stage_to_rank(StagePlacement::Loop, 0, 4), ValueError);
  EXPECT_THROW(stage_to_rank(StagePlacement::Bidirectional, 4, 6), ValueError);
}

TEST(StagePlacement, BidirectionalHasTwoChains) {
  const StageMap map = StageMap::make(StagePlacement::Bidirectional, 4, 8, 16);
  EXPECT_THAT(map.stage_to_rank(), ElementsAre(0, 1, 2, 3, 3, 2, 1, 0));
  EXPECT_TRUE(map.is_last(3));
  EXPECT_TRUE(map.is_first(4));
  EXPECT_FALSE(map.is_first(5));
  EXPECT_TRUE(map.runs(4, 8));
  EXPECT_FALSE(map.runs(3, 8));
  EXPECT_EQ(map.microbatches(), 16);
}

TEST(Names, AnyCaseAndTheNearestOneInTheError) {
  EXPECT_EQ(schedule_kind("1f1b"), ScheduleKind::OneFOneB);
  EXPECT_EQ(schedule_kind("vpp"), ScheduleKind::Interleaved1F1B);
  EXPECT_EQ(schedule_kind("zb1p"), ScheduleKind::InterleavedZeroBubble);
  for (const ScheduleKind kind : all_schedule_kinds()) EXPECT_EQ(schedule_kind(to_text(kind)), kind);
  EXPECT_THAT(message_of<ValueError>([] { schedule_kind("interleaved_1f1c"); }),
              HasSubstr("did you mean Interleaved1F1B?"));
  EXPECT_THAT(message_of<ValueError>([] { schedule_kind("PipelineScheduleMulti"); }),
              HasSubstr("from a file"));
  EXPECT_FALSE(resolve_schedule_name("VMin").in_reference);
}

TEST(Names, WordsMayBeJoinedByUnderscores) {
  // The four stable values of the enumeration that configurations use.
  EXPECT_EQ(schedule_kind("1f1b"), ScheduleKind::OneFOneB);
  EXPECT_EQ(schedule_kind("interleaved_1f1b"), ScheduleKind::Interleaved1F1B);
  EXPECT_EQ(schedule_kind("gpipe"), ScheduleKind::GPipe);
  EXPECT_EQ(schedule_kind("vpp"), ScheduleKind::Interleaved1F1B);
  const std::pair<const char*, ScheduleKind> others[] = {
      {"looped_bfs", ScheduleKind::LoopedBFS},
      {"interleaved_zero_bubble", ScheduleKind::InterleavedZeroBubble},
      {"zbv-zero-bubble", ScheduleKind::ZBVZeroBubble},
      {"dual_pipe_v", ScheduleKind::DualPipeV},
      {"dual_pipe", ScheduleKind::DualPipe},
      {"V_Half", ScheduleKind::VHalf}};
  for (const auto& [name, kind] : others) EXPECT_EQ(schedule_kind(name), kind) << name;
  EXPECT_EQ(resolve_schedule_name("interleaved_1f1b").name, "Interleaved1F1B");
  EXPECT_FALSE(resolve_schedule_name("interleaved_1f1b").in_reference);
  EXPECT_TRUE(resolve_schedule_name("INTERLEAVED1f1b").in_reference);
  EXPECT_THROW(schedule_kind("_"), ValueError);
  EXPECT_THROW(schedule_kind(""), ValueError);
}

TEST(Shapes, ErrorsSuggestValidShapes) {
  EXPECT_THAT(message_of<ValueError>([] { one_f_one_b(shape(4, 1, 2)); }),
              AllOf(HasSubstr("1F1B"), HasSubstr("got 2"), HasSubstr("at least 4")));
  EXPECT_THAT(
      message_of<ValueError>([] { zbv_zero_bubble(shape(4, 1, 8)); }),
      AllOf(HasSubstr("ZBVZeroBubble"), HasSubstr("got 1"), HasSubstr("expected 2"), HasSubstr("8 stages")));
  EXPECT_THAT(message_of<ValueError>([] { interleaved_1f1b(shape(4, 2, 9)); }),
              HasSubstr("use 8 or 12 microbatches"));
  EXPECT_THROW(dual_pipe(shape(3, 2, 12)), ValueError);
  EXPECT_THROW(dual_pipe(shape(4, 2, 9)), ValueError);
  EXPECT_THROW(gpipe(shape(0, 1, 1)), ValueError);
  EXPECT_THROW(gpipe(shape(1, 1, 0)), ValueError);
  EXPECT_THROW(gpipe(shape(2, 2, 4)), ValueError);
  EXPECT_THROW(looped_bfs(shape(65536, 256, 1 << 20)), ValueError);
  PipelineShape grouped = shape(2, 1, 4);
  grouped.group_size = 2;
  EXPECT_THROW(gpipe(grouped), ValueError);
}

TEST(Shapes, GroupSizeIsTunable) {
  PipelineShape grouped = shape(2, 2, 6);
  grouped.group_size = 3;
  const Schedule schedule = interleaved_1f1b(grouped);
  std::string first;
  for (const Slot slot : schedule.row(0)) {
    if (!slot.empty() && slot[0].kind() == ActionKind::Forward) first += to_text(slot) + " ";
  }
  EXPECT_EQ(first, "0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 0F5 2F3 2F4 2F5 ");
  grouped.group_size = 1;
  EXPECT_THROW(interleaved_1f1b(grouped), ValueError);
  PipelineShape rest = shape(4, 2, 10);
  rest.group_size = 8;
  EXPECT_THAT(message_of<ValueError>([&] { interleaved_1f1b(rest); }), HasSubstr("0 or at least 4"));
}

TEST(VirtualPipeline, StagesOfARank) {
  EXPECT_THAT(virtual_stages_of_rank(1, 4, 3), ElementsAre(1, 5, 9));
  EXPECT_THROW(virtual_stages_of_rank(4, 4, 3), ValueError);
  EXPECT_THROW(virtual_stages_of_rank(-1, 4, 3), ValueError);
}

TEST(VirtualPipeline, TableOfEightMicrobatchesTwoChunksFourRanks) {
  std::string text;
  for (const TableEntry& entry : virtual_pipeline_table(8, 2, 4)) {
    text += std::to_string(entry.microbatch) + "/" + std::to_string(entry.chunk) + " ";
  }
  EXPECT_EQ(text, "0/0 1/0 2/0 3/0 0/1 1/1 2/1 3/1 4/0 5/0 6/0 7/0 4/1 5/1 6/1 7/1 ");
}

TEST(VirtualPipeline, TableGroupDefaultsAndRest) {
  EXPECT_EQ(virtual_pipeline_table(6, 2), virtual_pipeline_table(6, 2, std::nullopt, 6));
  EXPECT_EQ(virtual_pipeline_table(6, 2, 4), virtual_pipeline_table(6, 2, 4, 4));
  const auto table = virtual_pipeline_table(5, 2, 3);
  EXPECT_EQ(table.size(), 10u);
  EXPECT_EQ(table[6], (TableEntry{3, 0}));
  EXPECT_EQ(table[8], (TableEntry{3, 1}));
}

TEST(VirtualPipeline, WarmUp) {
  const WarmUp counts = warm_up_counts(1, 4, 2, 8);
  EXPECT_EQ(counts.total, 16);
  EXPECT_EQ(counts.warm_up, 2 * 2 + 4);
  EXPECT_EQ(counts.remaining, 8);
  EXPECT_FALSE(counts.all_warm_up);
  EXPECT_TRUE(warm_up_counts(0, 8, 2, 4).all_warm_up);
  const WarmUp forward_only = warm_up_counts(3, 4, 2, 8, std::nullopt, true);
  EXPECT_EQ(forward_only.warm_up, 16);
  EXPECT_EQ(forward_only.remaining, 0);
  EXPECT_TRUE(forward_only.all_warm_up);
}

// The group size equals the rank count if and only if the microbatches are a multiple of it.
TEST(VirtualPipeline, MicrobatchesPerRound) {
  EXPECT_EQ(microbatches_per_round(5, 4), 5);
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int microbatches = 1; microbatches <= 60; ++microbatches) {
      if (microbatches % ranks == 0) {
        EXPECT_EQ(microbatches_per_round(microbatches, ranks), ranks);
      }
      if (microbatches < ranks) {
        EXPECT_EQ(microbatches_per_round(microbatches, ranks), microbatches);
      }
    }
  }
}

// The helpers describe the generated schedule: the order of forwards, of backwards, and the warm-up.
TEST(VirtualPipeline, HelpersAgreeWithTheSchedule) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (int chunks = 1; chunks <= 4; ++chunks) {
      for (int group = ranks; group <= ranks + 3; ++group) {
        for (int microbatches = group; microbatches <= 4 * group; ++microbatches) {
          const int rest = microbatches % group;
          if (rest != 0 && rest < ranks) continue;
          PipelineShape grouped = shape(ranks, chunks, microbatches);
          grouped.group_size = group;
          const Schedule schedule = interleaved_1f1b(grouped);
          const auto table = virtual_pipeline_table(microbatches, chunks, ranks, group);
          for (int rank = 0; rank < ranks; ++rank) {
            std::size_t forwards = 0;
            std::size_t backwards = 0;
            std::size_t before_first_backward = 0;
            for (const Slot slot : schedule.row(rank)) {
              if (slot.empty()) continue;
              const bool is_forward = slot[0].kind() == ActionKind::Forward;
              const TableEntry& entry = table[is_forward ? forwards : backwards];
              const int chunk = is_forward ? entry.chunk : backward_chunk(entry.chunk, chunks);
              ASSERT_EQ(slot[0].stage(),
                        virtual_stages_of_rank(rank, ranks, chunks)[static_cast<std::size_t>(chunk)]);
              ASSERT_EQ(*slot[0].microbatch(), entry.microbatch);
              if (!is_forward && backwards == 0) before_first_backward = forwards;
              ++(is_forward ? forwards : backwards);
            }
            const WarmUp counts = warm_up_counts(rank, ranks, chunks, microbatches, group);
            ASSERT_EQ(before_first_backward,
                      static_cast<std::size_t>(counts.warm_up + (counts.all_warm_up ? 0 : 1)));
          }
        }
      }
    }
  }
}

TEST(VirtualPipeline, BubbleShareDividesTheBubblesTimeByTheChunks) {
  EXPECT_NEAR(bubble_share(4, 1, 8), 3.0 / 11, 1e-12);
  EXPECT_NEAR(bubble_share(4, 2, 8), 0.158, 5e-4);
  EXPECT_DOUBLE_EQ(bubble_share(1, 4, 8), 0);
}

// P - rank microbatches are in flight, neither one nor P.
TEST(OneFOneB, HoldsRanksMinusRankMicrobatches) {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    for (int microbatches = ranks; microbatches <= 3 * ranks; ++microbatches) {
      const Schedule schedule = one_f_one_b(shape(ranks, 1, microbatches));
      for (int rank = 0; rank < ranks; ++rank) {
        int held = 0;
        int most = 0;
        for (const Slot slot : schedule.row(rank)) {
          held += slot[0].kind() == ActionKind::Forward ? 1 : -1;
          most = std::max(most, held);
        }
        EXPECT_EQ(most, one_f_one_b_in_flight(rank, ranks, microbatches));
      }
    }
  }
}

TEST(Lower, OptionsDisableSinglePasses) {
  LowerOptions plain;
  plain.unshard = false;
  plain.reduce_grad = false;
  EXPECT_EQ(to_csv(lower(gpipe(shape(2, 1, 1)), plain)),
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
  LowerOptions none;
  none.max_active_stages = 0;
  EXPECT_THROW(lower(gpipe(shape(2, 1, 1)), none), ValueError);
  EXPECT_THROW(lower(lower(gpipe(shape(2, 1, 1)))), ValueError);
}

// As in PyTorch, but with the place in the message; PyTorch does not check inside overlaps.
TEST(Lower, NonComputeActionsAreRefusedByName) {
  const auto message = [](const char* csv) {
    try {
      lower(parse_schedule(csv));
    } catch (const ValueError& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  for (const auto& [csv, named] :
       {std::pair{"0F0,0SEND_F0,0B0\n1F0,1B0\n", "0SEND_F0 on rank 0, slot 1"},
        std::pair{"0F0,0B0\n1RECV_F0,1F0,1B0\n", "1RECV_F0 on rank 1, slot 0"},
        std::pair{"0F0,,0RECV_B0,0B0\n1F0,1B0\n", "0RECV_B0 on rank 0, slot 2"},
        std::pair{"0F0,0B0\n1F0,1B0,1SEND_B0\n", "1SEND_B0 on rank 1, slot 2"},
        std::pair{"0UNSHARD,0F0,0B0\n", "0UNSHARD on rank 0, slot 0"},
        std::pair{"0F0,0B0,0RESHARD\n", "0RESHARD on rank 0, slot 2"},
        std::pair{"0F0,0B0,0REDUCE_GRAD\n", "0REDUCE_GRAD on rank 0, slot 2"},
        std::pair{"0F0,(0F1;0SEND_F0)OVERLAP_F_B,0B0,0B1\n", "0SEND_F0 on rank 0, slot 1"}}) {
    EXPECT_NE(message(csv).find(named), std::string::npos) << message(csv);
    EXPECT_FALSE(is_compute_only(parse_schedule(csv)));
  }
  EXPECT_TRUE(is_compute_only(gpipe(shape(2, 1, 1))));
}

// The comments show what PyTorch 2.14 does with the same text.
TEST(ActionText, MalformedOverlapsAreRefused) {
  for (const char* text : {
           "(0F0",                                   // refused
           "(0F0;1B0)",                              // refused
           "(0F0;1B0)overlap_f_b",                   // refused
           "(0F0;1B0) OVERLAP_F_B",                  // refused
           "(0F0;1B0)OVERLAP_F_Bx",                  // refused
           "(0F0;1B0)OVERLAP_F_B)",                  // refused
           "((0F0;1B0)OVERLAP_F_B;2F0)OVERLAP_F_B",  // refused
           "(0F0;1X0)OVERLAP_F_B",                   // refused
           "0OVERLAP_F_B",                           // refused
           "OVERLAP_F_B",                            // refused
           "(0F0;1B0)F",                             // a forward with members
           "(0F0;1B0)UNSHARD",                       // an UNSHARD with members
           "()OVERLAP_F_B",                          // an overlap of stage -1 without members
           "( )OVERLAP_F_B",                         // the same
           "(;)OVERLAP_F_B",                         // the same
           "(0F0)OVERLAP_F_B",                       // an overlap of one
           "(0F0;;1B0)OVERLAP_F_B",                  // an overlap of two
           "(0F0;1B0;)OVERLAP_F_B",                  // an overlap of two
           "(0F0,1B0)OVERLAP_F_B",  // an overlap of one: what follows the first action is dropped
           "(0F0 1B0)OVERLAP_F_B",  // the same
           "0F0;1B0)OVERLAP_F_B",   // 0F0: the rest is dropped
       })
    EXPECT_THROW(parse_cell(text), ConfigError) << text;
  EXPECT_EQ(parse_cell("( 0F0 ; 1B0 )OVERLAP_F_B ").size(), 2u);
  EXPECT_EQ(parse_cell("(0F0;1B0;2F1)OVERLAP_F_B").size(), 3u);
}

}  // namespace schedule_test
}  // namespace penstock::schedule
