// Channels are connected before the first step, each once, for every placement; and the errors if that fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "penstock/comm/record/recorder.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace warm_up_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Block;
using test::has_text;

std::string text(std::string_view view) { return std::string(view); }

std::uint64_t last_record() {
  std::uint64_t last = 0;
  for (const comm::OperationRecord& record : comm::Recorder::global().snapshot())
    last = std::max(last, record.id);
  return last;
}

struct Seen {
  std::vector<std::string> warm_up;  // "send warm-up: activation of stage 0 to stage 1", sorted
  std::uint64_t last_warm_up = 0;
  std::uint64_t first_of_step = ~std::uint64_t{0};
};

Seen seen_since(std::uint64_t before) {
  Seen seen;
  for (const comm::OperationRecord& record : comm::Recorder::global().snapshot()) {
    if (record.id <= before) continue;
    const std::string label = text(record.label.view()), operation = text(record.operation.view());
    if (label.starts_with("warm-up: ") || label == "warm-up of copies") {
      seen.warm_up.push_back(operation + " " + label);
      seen.last_warm_up = std::max(seen.last_warm_up, record.id);
      EXPECT_EQ(record.state, comm::OperationState::Done) << label;
    } else if (label.find("SEND_") != std::string::npos || label.find("RECV_") != std::string::npos) {
      seen.first_of_step = std::min(seen.first_of_step, record.id);
    }
  }
  std::sort(seen.warm_up.begin(), seen.warm_up.end());
  return seen;
}

// Names both ends of every channel.
std::vector<std::string> both_ends(const std::vector<std::string>& channels, int sums_of_copies = 0) {
  std::vector<std::string> all(static_cast<std::size_t>(sums_of_copies), "all_reduce warm-up of copies");
  for (const std::string& channel : channels)
    for (const char* end : {"send", "recv"})
      all.push_back(std::string(end) + " " +
                    ("warm-up: " + channel).substr(0, 47));  // records truncate labels
  std::sort(all.begin(), all.end());
  return all;
}

PipelineRuntime pipeline_of(comm::World& world, ScheduleKind kind, int stages_per_rank,
                            const std::vector<SkipTensor>& skips = {}) {
  const int ranks = world.size(), count = ranks * stages_per_rank;
  const schedule::Schedule whole = schedule::generate(
      kind, {.ranks = ranks, .stages_per_rank = stages_per_rank, .microbatches = 4, .group_size = {}});
  const int parts = whole.stages().chains().front().stages;
  std::vector<PipelineStage> stages;
  for (const int index : whole.stages().stages_of(world.rank())) {
    Block block(index % parts);
    const auto from = [&](int stage) {
      return std::any_of(skips.begin(), skips.end(),
                         [&](const SkipTensor& skip) { return skip.from == stage; });
    };
    stages.emplace_back(StageModule(
                            [block, gives = from(index)](const Tree& args, const Tree&) mutable {
                              at::Tensor h = block->forward(args[0].tensor());
                              if (args.size() > 1) h = h + args[1].tensor();
                              return gives ? Tree::tuple({h, h.sin()}) : Tree(h);
                            },
                            {block.ptr()}),
                        index, count, at::kCPU);
  }
  PipelineOptions options{world};
  options.skips = skips;
  return {stages, whole, test::square_loss(), options};
}

void expect_warm_up(int ranks, ScheduleKind kind, int stages_per_rank, const std::vector<SkipTensor>& skips,
                    const std::vector<std::string>& expected) {
  SCOPED_TRACE(schedule::to_text(kind));
  for (const bool by_hand : {false, true}) {
    const std::uint64_t before = last_record();
    comm::run_ranks(ranks, 30s, [&](comm::World& world) {
      PipelineRuntime pipeline = pipeline_of(world, kind, stages_per_rank, skips);
      if (by_hand) pipeline.warm_up();
      const test::Batch batch = test::plain_batch(0, 8);
      for (int step = 0; step < 2; ++step) pipeline.step(batch.args, {}, batch.target);
      if (by_hand) pipeline.warm_up();
    });
    const Seen seen = seen_since(before);
    EXPECT_EQ(seen.warm_up, expected);
    EXPECT_LT(seen.last_warm_up, seen.first_of_step);
  }
}

TEST(WarmUp, EveryChannelOnce) {
  expect_warm_up(3, ScheduleKind::OneFOneB, 1, {},
                 both_ends({"activation of stage 0 to stage 1", "activation of stage 1 to stage 2",
                            "gradient of stage 1 to stage 0", "gradient of stage 2 to stage 1"}));
  expect_warm_up(2, ScheduleKind::Interleaved1F1B, 2, {},
                 both_ends({"activation of stage 0 to stage 1", "activation of stage 1 to stage 2",
                            "activation of stage 2 to stage 3", "gradient of stage 1 to stage 0",
                            "gradient of stage 2 to stage 1", "gradient of stage 3 to stage 2"}));
}

TEST(WarmUp, StagesOfOneRankNeedNone) {
  expect_warm_up(2, ScheduleKind::ZBVZeroBubble, 2, {},
                 both_ends({"activation of stage 0 to stage 1", "activation of stage 2 to stage 3",
                            "gradient of stage 1 to stage 0", "gradient of stage 3 to stage 2"}));
  expect_warm_up(1, ScheduleKind::OneFOneB, 1, {}, {});
}

TEST(WarmUp, SkipConnections) {
  expect_warm_up(
      3, ScheduleKind::GPipe, 1, {{"early", 0, 2}},
      both_ends({"activation of stage 0 to stage 1", "activation of stage 1 to stage 2",
                 "gradient of stage 1 to stage 0", "gradient of stage 2 to stage 1",
                 "skip 0: activation of stage 0 to stage 2", "skip 0: gradient of stage 2 to stage 0"}));
}

TEST(WarmUp, CopiesOfABidirectionalPipeline) {
  // Two parts, each on both ranks: a sum for each on each of them.
  expect_warm_up(2, ScheduleKind::DualPipe, 2, {},
                 both_ends({"activation of stage 0 to stage 1", "activation of stage 2 to stage 3",
                            "gradient of stage 1 to stage 0", "gradient of stage 3 to stage 2"},
                           4));
}

// What each rank ended with.
std::vector<std::string> ends_of(int ranks, std::chrono::milliseconds timeout,
                                 const std::function<void(comm::World&)>& body) {
  std::vector<std::string> ends(static_cast<std::size_t>(ranks));
  const auto noting = [&](comm::World& world) {
    std::string& end = ends[static_cast<std::size_t>(world.rank())];
    try {
      body(world);
    } catch (const TimeoutError& error) {
      end = std::string("TimeoutError: ") + error.what();
      throw;
    } catch (const PeerLostError& error) {
      end = std::string("PeerLostError: ") + error.what();
      throw;
    } catch (const std::exception& error) {
      end = std::string("other: ") + error.what();
      throw;
    }
  };
  EXPECT_ANY_THROW(comm::run_ranks(ranks, timeout, noting));
  return ends;
}

TEST(WarmUp, ARankThatFailsBeforeIt) {
  const auto ends = ends_of(3, 20s, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, ScheduleKind::OneFOneB, 1);
    if (world.rank() == 2) throw std::runtime_error("the disk is full");
    pipeline.warm_up();
  });
  for (const std::size_t rank : {0, 1}) {
    EXPECT_TRUE(has_text(ends[rank], "PeerLostError: "));
    EXPECT_TRUE(has_text(ends[rank], "the disk is full"));
  }
}

TEST(WarmUp, ARankThatDoesNotCome) {
  const auto begin = std::chrono::steady_clock::now();
  const auto ends = ends_of(3, 5s, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, ScheduleKind::OneFOneB, 1);
    if (world.rank() == 2) std::this_thread::sleep_for(9s);
    pipeline.warm_up();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
  // The rank that gives up first notifies the other one; the one that came too late receives that.
  for (const std::size_t rank : {0, 1}) {
    EXPECT_TRUE(ends[rank].starts_with("TimeoutError: ") || ends[rank].starts_with("PeerLostError: "))
        << ends[rank];
    EXPECT_TRUE(has_text(ends[rank], "warm-up of the pipeline"));
    EXPECT_TRUE(has_text(ends[rank], "no status from rank 2"));
  }
  EXPECT_TRUE(has_text(ends[2], "PeerLostError: "));
}

TEST(WarmUp, RanksThatDisagreeAboutPlacement) {
  const auto ends = ends_of(2, 20s, [](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(
        world, world.rank() == 0 ? ScheduleKind::Interleaved1F1B : ScheduleKind::ZBVZeroBubble, 2);
    pipeline.warm_up();
  });
  for (const std::string& end : ends)
    EXPECT_TRUE(has_text(end, "ranks of a pipeline disagree: places of its stages"));
}

TEST(WarmUp, AFailureIsFinal) {
  std::string second;
  ends_of(2, 20s, [&](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, ScheduleKind::OneFOneB, 1);
    if (world.rank() == 1) throw std::runtime_error("gone");
    EXPECT_THROW(pipeline.warm_up(), PeerLostError);
    try {
      pipeline.step(test::plain_batch(0, 8).args);
    } catch (const StateError& error) {
      second = error.what();
    }
    throw std::runtime_error("as expected");
  });
  EXPECT_TRUE(has_text(second, "an earlier one failed"));
}

}  // namespace warm_up_test
}  // namespace penstock
