// Steps in a world of threads: their traces, and the reports about stalled or failed steps.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "penstock/base/files.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/report/trace_comparison.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/step_context.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace step_watch_test {

using namespace std::chrono_literals;
using test::has_text;

constexpr std::int64_t kWidth = 4;

// A layer whose forward of one microbatch does something unexpected, only in training.
StageModule layer(int microbatch, std::function<void()> surprise) {
  torch::nn::Linear linear(kWidth, kWidth);
  return StageModule(
      [module = linear.ptr(), microbatch, surprise](at::Tensor x) {
        const auto step = StepContext::current();
        if (surprise && !step->trial && step->microbatch == microbatch) surprise();
        return torch::tanh(module->forward(x));
      },
      {linear.ptr()});
}

PipelineLoss squares() {
  return PipelineLoss(
      [](const at::Tensor& output, const at::Tensor& target) { return (output - target).pow(2).mean(); });
}

struct Setting {
  std::string schedule = "1F1B";
  int microbatches = 4;
  int stages_per_rank = 1;
  int surprised_stage = -1;
  int surprised_microbatch = 1;
  std::function<void()> surprise;
};

PipelineRuntime pipeline_of(comm::World& world, const Setting& setting) {
  const int count = world.size() * setting.stages_per_rank;
  const auto map = schedule::rank_to_stages(schedule::placement_of(schedule::schedule_kind(setting.schedule)),
                                            world.size(), count);
  std::vector<PipelineStage> stages;
  for (const int index : map[static_cast<std::size_t>(world.rank())])
    stages.emplace_back(
        layer(setting.surprised_microbatch, index == setting.surprised_stage ? setting.surprise : nullptr),
        index, count, at::kCPU);
  return make_pipeline(setting.schedule, stages, setting.microbatches, squares(), PipelineOptions{world});
}

void run_step(PipelineRuntime& pipeline, int microbatches) {
  const at::Tensor x = at::ones({2 * microbatches, kWidth});
  pipeline.step(Tree::tuple({x}), {}, x);
}

// ----------------------------------------------------------------------------------------------------------------
// traces

void expect_whole_trace(const StepTrace& trace, const schedule::Schedule& schedule) {
  EXPECT_EQ(trace.schedule, schedule);
  std::int64_t first = 1;
  ASSERT_EQ(trace.ranks.size(), static_cast<std::size_t>(schedule.ranks()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::size_t computed = 0, wanted = 0;
    std::int64_t now = 0;
    for (const TraceEvent& event : trace.ranks[static_cast<std::size_t>(rank)]) {
      EXPECT_GE(event.begin_ns, now);
      EXPECT_GE(event.end_ns, event.begin_ns);
      now = event.end_ns;
      first = std::min(first, event.begin_ns);
      if (event.kind == TraceEvent::Kind::Compute) computed += event.actions.size();
    }
    for (const schedule::Slot slot : schedule.row(rank))
      for (const schedule::Action& action : slot) wanted += schedule::is_compute(action.kind());
    EXPECT_EQ(computed, wanted);
  }
  EXPECT_EQ(first, 0);
  // Nothing arrives before it is sent: the clocks agree.
  for (const auto& events : trace.ranks)
    for (const TraceEvent& await : events) {
      if (await.kind != TraceEvent::Kind::Await) continue;
      for (const TraceEvent& send : trace.ranks[static_cast<std::size_t>(await.channel->from_rank)])
        if (send.kind == TraceEvent::Kind::Send && send.channel == await.channel &&
            send.actions[0].microbatch() == await.actions[0].microbatch()) {
          EXPECT_GE(await.end_ns, send.begin_ns);
        }
    }
}

TEST(PipelineTrace, HasEveryActionOfEveryRankOnOneClock) {
  for (const Setting& setting :
       {Setting{.schedule = "1F1B"},
        Setting{.schedule = "ZBVZeroBubble", .microbatches = 6, .stages_per_rank = 2},
        Setting{.schedule = "DualPipeV", .microbatches = 6, .stages_per_rank = 2}}) {
    SCOPED_TRACE(setting.schedule);
    comm::run_ranks(3, 60s, [&](comm::World& world) {
      PipelineRuntime pipeline = pipeline_of(world, setting);
      EXPECT_THROW(trace_last_step(pipeline), StateError);
      for (int step = 1; step <= 2; ++step) {
        run_step(pipeline, setting.microbatches);
        const auto trace = trace_last_step(pipeline, step == 2);
        ASSERT_EQ(trace.has_value(), world.rank() == 0);
        if (!trace) continue;
        EXPECT_EQ(trace->step, static_cast<std::uint64_t>(step));
        expect_whole_trace(*trace, pipeline.schedule());
        EXPECT_EQ(parse_trace(to_chrome_json(*trace)), *trace);
        const TraceComparison comparison = compare_with_simulation(*trace);
        EXPECT_GT(comparison.simulated_ms, 0);
        EXPECT_GT(comparison.measured_ms, 0);
      }
    });
  }
}

TEST(PipelineTrace, OfEvaluationHasOnlyForwards) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("penstock-trace-" + std::to_string(::getpid()) + ".json"))
          .string();
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, {});
    pipeline.eval(Tree::tuple({at::ones({8, kWidth})}));
    pipeline.write_trace(path);
    if (world.rank() != 0) return;
    const StepTrace trace = read_trace(path);
    EXPECT_EQ(trace.schedule, forward_only(pipeline.schedule()));
    for (const auto& events : trace.ranks)
      for (const TraceEvent& event : events)
        if (event.kind == TraceEvent::Kind::Compute) {
          EXPECT_EQ(event.actions[0].kind(), schedule::ActionKind::Forward);
        }
    EXPECT_EQ(compare_with_simulation(trace).ranks.size(), 2u);
  });
  std::filesystem::remove(path);
}

// A unit's forward and backward run block by block in turns, and the trace of every rank shows it.
TEST(PipelineTrace, OverlappedUnitsTakeTurns) {
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    std::vector<PipelineStage> stages;
    for (const int index : {world.rank(), 3 - world.rank()}) {
      std::vector<StageModule> blocks;
      for (int block = 0; block < 3; ++block) blocks.emplace_back(test::Block(3 * index + block));
      stages.emplace_back(StageModule::chain(blocks), index, 4, at::kCPU);
    }
    PipelineRuntime pipeline = make_pipeline("DualPipeV", stages, 6, test::square_loss(), {world});
    const test::Batch batch = test::plain_batch(0, 12);
    pipeline.step(batch.args, {}, batch.target);
    const auto trace = trace_last_step(pipeline);
    if (!trace) return;
    for (const auto& events : trace->ranks) {
      int units = 0;
      for (const TraceEvent& event : events) {
        if (event.actions.size() < 2) {
          EXPECT_TRUE(event.pieces.empty());
          continue;
        }
        ++units;
        int turns = 0;
        for (std::size_t i = 0; i < event.pieces.size(); ++i) {
          EXPECT_GE(event.pieces[i].begin_ns, i > 0 ? event.pieces[i - 1].end_ns : event.begin_ns);
          EXPECT_LE(event.pieces[i].end_ns, event.end_ns);
          turns += i > 0 && event.pieces[i].member != event.pieces[i - 1].member;
        }
        EXPECT_GE(turns, 4) << action_text(event) << ": three blocks forward and three backward in turns";
      }
      EXPECT_GT(units, 0);
    }
    EXPECT_EQ(parse_trace(to_chrome_json(*trace)), *trace);
  });
}

TEST(PipelineTrace, OneRankNeedsNobody) {
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    PipelineRuntime pipeline = pipeline_of(world, {});
    run_step(pipeline, 4);
    const auto trace = trace_last_step(pipeline);
    ASSERT_TRUE(trace);
    expect_whole_trace(*trace, pipeline.schedule());
    EXPECT_GT(compare_with_simulation(*trace).efficiency(), 0.1);
  });
}

// ----------------------------------------------------------------------------------------------------------------
// stalls

// Runs a step that fails and keeps the error of every rank.
std::map<int, std::string> errors_of(int ranks, std::chrono::milliseconds timeout, const Setting& setting) {
  std::map<int, std::string> errors;
  std::mutex mutex;
  try {
    comm::run_ranks(ranks, timeout, [&](comm::World& world) {
      PipelineRuntime pipeline = pipeline_of(world, setting);
      try {
        run_step(pipeline, setting.microbatches);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        errors[world.rank()] = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {
    // The error of every rank is checked.
  }
  return errors;
}

// A module that does not return: the waiting ranks report where they wait, for which rank and how long, and
// which rank holds them up.
TEST(PipelineStall, AModuleThatHangsIsNamedOnTheWaitingRanks) {
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("penstock-stall-" + std::to_string(::getpid()))).string();
  ::setenv("PENSTOCK_STALL_DIR", folder.c_str(), 1);
  const auto errors = errors_of(3, 6s, {.surprised_stage = 1, .surprised_microbatch = 1, .surprise = [] {
                                          std::this_thread::sleep_for(10s);
                                        }});
  ::unsetenv("PENSTOCK_STALL_DIR");
  ASSERT_TRUE(errors.contains(0));
  ASSERT_TRUE(errors.contains(2));
  for (const int rank : {0, 2}) {
    const std::string& text = errors.at(rank);
    SCOPED_TRACE(rank);
    EXPECT_TRUE(has_text(text, "pipeline stalled, seen from rank " + std::to_string(rank)));
    EXPECT_TRUE(has_text(text, "s: compute 1F1"));
    EXPECT_TRUE(has_text(text, "await 2RECV_F1 (activation of stage 1 to stage 2), waits for rank 1"));
    EXPECT_TRUE(has_text(text, "gradient of stage 1 to stage 0), waits for rank 1"));
    EXPECT_TRUE(has_text(text, "rank 1 is busy and holds up ranks 0, 2"));
    std::ifstream file(folder + "/stall-rank" + std::to_string(rank) + ".json");
    const auto report = nlohmann::json::parse(file);
    EXPECT_EQ(report.at("cause").at("kind"), "busy rank");
    EXPECT_EQ(report.at("cause").at("ranks"), std::vector<int>{1});
    EXPECT_EQ(report.at("ranks").at(1).at("stage"), 1);
    EXPECT_EQ(report.at("ranks").at(1).at("microbatch"), 1);
    EXPECT_EQ(report.at("ranks").at(1).at("kind"), "F");
    EXPECT_GT(report.at("ranks").at(1).at("for_s").get<double>(), 0.5);
  }
  remove_tree(folder);
}

// A rank that does not enter a step is found, too.
TEST(PipelineStall, ARankThatDoesNotComeToAStep) {
  std::string text;
  try {
    comm::run_ranks(2, 6s, [&](comm::World& world) {
      PipelineRuntime pipeline = pipeline_of(world, {});
      run_step(pipeline, 4);
      if (world.rank() == 1) std::this_thread::sleep_for(10s);
      try {
        run_step(pipeline, 4);
      } catch (const CommError& error) {
        if (world.rank() == 0) text = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {
    // The error of rank 0 is checked.
  }
  EXPECT_TRUE(has_text(text, "rank 0  step 2"));
  EXPECT_TRUE(has_text(text, "agrees with all ranks on the step"));
  EXPECT_TRUE(
      has_text(text, "rank 1 is not in the step that the others are in and holds up rank 0: after step 1"));
}

// A failure of one rank: the others quote it and report where they were; no rank is kept waiting.
TEST(PipelineStall, AFailureIsQuotedAndDoesNotTakeLong) {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of(3, 60s, {.surprised_stage = 1, .surprised_microbatch = 1, .surprise = [] {
                                           throw std::runtime_error("no more memory");
                                         }});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 40s);
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_FALSE(has_text(errors.at(1), "seen from rank"));
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(has_text(errors.at(rank), "pipeline step failed, seen from rank " + std::to_string(rank)));
    EXPECT_TRUE(has_text(errors.at(rank), "compute 1F1; ended by: stage 1, microbatch 1"));
    EXPECT_TRUE(has_text(errors.at(rank), "no more memory"));
  }
}

// After successful steps the watch leaves no trace: no error, no wait, any number of pipelines one after the
// other.
TEST(PipelineStall, PipelinesComeAndGo) {
  const auto begin = std::chrono::steady_clock::now();
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    for (int i = 0; i < 3; ++i) {
      PipelineRuntime pipeline = pipeline_of(world, {});
      run_step(pipeline, 4);
      PipelineRuntime moved = std::move(pipeline);
      run_step(moved, 4);
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

}  // namespace step_watch_test
}  // namespace penstock
