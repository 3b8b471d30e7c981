// Traces without running steps: made from simulated times, written, read, damaged, compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/pipeline/report/trace_comparison.h"
#include "tests/has_text.h"
#include "tests/pipeline/simulated_trace.h"

namespace penstock {
namespace step_trace_test {

using nlohmann::json;
using test::has_text;
using test::simulated_trace;

TEST(StepTrace, IsReadBackAsItWasWritten) {
  for (const char* kind : {"1F1B", "GPipe", "ZBVZeroBubble", "DualPipeV"}) {
    SCOPED_TRACE(kind);
    const StepTrace trace = simulated_trace(kind, 4, 8);
    EXPECT_EQ(parse_trace(to_chrome_json(trace)), trace);
  }
}

TEST(StepTrace, HasOneTrackPerRankAndKindAndAnArrowPerTransfer) {
  const StepTrace trace = simulated_trace("1F1B", 2, 3);
  const json document = json::parse(to_chrome_json(trace));
  int sends = 0, starts = 0, ends = 0;
  for (const json& event : document.at("traceEvents")) {
    if (event.at("ph") == "s") ++starts;
    if (event.at("ph") == "f") ++ends;
    if (event.at("ph") != "X") continue;
    sends += event.at("cat") == "send";
    if (event.at("cat") == "compute") {
      EXPECT_EQ(event.at("tid"), 0);
    } else if (event.at("cat") == "await") {
      EXPECT_EQ(event.at("tid"), 1);
    }
    EXPECT_DOUBLE_EQ(event.at("ts").get<double>() * 1000, event.at("args").at("begin_ns").get<double>());
  }
  EXPECT_EQ(sends, 6);  // 3 activations and 3 gradients
  EXPECT_EQ(starts, sends);
  EXPECT_EQ(ends, sends);
}

TEST(StepTrace, AnOverlappedUnitShowsHowItsActionsTookTurns) {
  StepTrace trace = simulated_trace("DualPipeV", 2, 8);
  const auto unit = std::find_if(trace.ranks[0].begin(), trace.ranks[0].end(),
                                 [](const TraceEvent& event) { return event.actions.size() == 2; });
  ASSERT_NE(unit, trace.ranks[0].end());
  const std::int64_t quarter = (unit->end_ns - unit->begin_ns) / 4;
  for (int i = 0; i < 4; ++i)
    unit->pieces.push_back({i % 2, unit->begin_ns + i * quarter, unit->begin_ns + (i + 1) * quarter});
  const std::string text = to_chrome_json(trace);
  EXPECT_EQ(parse_trace(text), trace);
  std::vector<std::string> names;
  const json document = json::parse(text);
  for (const json& event : document.at("traceEvents"))
    if (event.value("cat", "") == "piece") names.push_back(event.at("name"));
  const std::string first = schedule::to_text(unit->actions[0]), second = schedule::to_text(unit->actions[1]);
  EXPECT_EQ(names, (std::vector<std::string>{first, second, first, second}));
  for (const json& bad :
       {json::array({2, unit->begin_ns, unit->end_ns}), json::array({1, unit->begin_ns - 1, unit->end_ns}),
        json::array({1, unit->begin_ns})}) {
    json changed = document;
    for (json& event : changed.at("traceEvents"))
      if (event.contains("args") && event.at("args").contains("pieces"))
        event.at("args").at("pieces").at(1) = bad;
    EXPECT_THROW(parse_trace(changed.dump()), ConfigError) << bad;
  }
}

TEST(StepTrace, AnOverlappedUnitIsOneEvent) {
  const StepTrace trace = simulated_trace("DualPipeV", 2, 8);
  bool found = false;
  for (const auto& events : trace.ranks)
    for (const TraceEvent& event : events)
      if (event.actions.size() == 2) {
        found = true;
        EXPECT_EQ(action_text(event),
                  schedule::to_text(event.actions[0]) + "|" + schedule::to_text(event.actions[1]));
      }
  EXPECT_TRUE(found);
}

TEST(StepTrace, DamageIsNamed) {
  const json good = json::parse(to_chrome_json(simulated_trace("1F1B", 2, 3)));
  const auto refused = [](const json& document) -> std::string {
    try {
      parse_trace(document.dump());
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THROW(parse_trace("not json"), ConfigError);
  EXPECT_TRUE(has_text(refused(json::array()), "no key \"penstock\""));
  json changed = good;
  changed["penstock"]["version"] = 2;
  EXPECT_TRUE(has_text(refused(changed), "version 2, this build reads 1"));
  changed = good;
  changed["penstock"]["stage_to_rank"] = {0, 7};
  EXPECT_TRUE(has_text(refused(changed), "trace of a step"));
  changed = good;
  changed["penstock"]["schedule"] = "0F0,0Q0\n1F0\n";
  EXPECT_TRUE(has_text(refused(changed), "\"Q0\" is not an action kind"));
  const auto first_slice = [](json& document) -> json& {
    for (json& event : document["traceEvents"])
      if (event.at("ph") == "X" && event.at("cat") == "compute") return event;
    throw std::logic_error("a trace without computation");
  };
  changed = good;
  first_slice(changed)["pid"] = 9;
  EXPECT_TRUE(has_text(refused(changed), "an event of rank 9, of 2 ranks"));
  changed = good;
  first_slice(changed)["args"]["end_ns"] = -5;
  EXPECT_TRUE(has_text(refused(changed), "ends before it begins"));
  changed = good;
  first_slice(changed)["args"]["actions"] = {"0SEND_F0"};
  EXPECT_TRUE(has_text(refused(changed), "an event of kind compute with the action 0SEND_F0"));
  changed = good;
  first_slice(changed)["args"].erase("begin_ns");
  EXPECT_TRUE(has_text(refused(changed), "begin_ns"));
}

TEST(StepTrace, FilesThatCannotBeUsedAreNamed) {
  EXPECT_THROW(read_trace("/nonexistent/step.json"), ConfigError);
  EXPECT_THROW(write_trace(simulated_trace("GPipe", 2, 2), "/nonexistent/step.json"), ConfigError);
}

// A step that ran exactly as simulated has an efficiency of 1.
TEST(TraceComparison, AStepAsSimulatedHasFullEfficiency) {
  for (const char* kind : {"1F1B", "GPipe", "ZBVZeroBubble"}) {
    SCOPED_TRACE(kind);
    const TraceComparison comparison = compare_with_simulation(simulated_trace(kind, 4, 8));
    EXPECT_NEAR(comparison.efficiency(), 1.0, 1e-3);
    EXPECT_NEAR(comparison.model.latency, 0.1, 1e-3);
    for (const ActionComparison& action : comparison.actions)
      EXPECT_NEAR(action.delay_ms(), 0, 1e-2) << action.action;
    for (const RankComparison& rank : comparison.ranks)
      EXPECT_NEAR(rank.busy_ms, rank.simulated_busy_ms, 1e-3);
  }
}

TEST(TraceComparison, CostsAreThoseOfTheStages) {
  const TraceComparison comparison = compare_with_simulation(simulated_trace("1F1B", 3, 6));
  ASSERT_EQ(comparison.costs.size(), 9u);  // F, B and REDUCE_GRAD of 3 stages
  for (const ActionCost& cost : comparison.costs) {
    if (cost.kind == schedule::ActionKind::ReduceGrad) continue;
    EXPECT_EQ(cost.count, 6);
    const double expected = test::made_cost(cost.stage, cost.kind);
    EXPECT_NEAR(cost.median_ms, expected, 1e-5);
    EXPECT_NEAR(cost.mean_ms, expected, 1e-5);
    EXPECT_NEAR(cost.simulated_ms, expected, 1e-5);
  }
}

// Everything after one slow action is late by its excess time.
TEST(TraceComparison, ADelayIsFound) {
  StepTrace trace = simulated_trace("1F1B", 2, 4);
  constexpr std::int64_t kLonger = 7'000'000;
  std::int64_t from = -1;
  for (const TraceEvent& event : trace.ranks[1])
    if (action_text(event) == "1F2") from = event.begin_ns;
  ASSERT_GE(from, 0);
  for (auto& events : trace.ranks)
    for (TraceEvent& event : events) {
      if (event.begin_ns > from) event.begin_ns += kLonger;
      if (event.end_ns > from) event.end_ns += kLonger;
    }
  const TraceComparison comparison = compare_with_simulation(trace);
  EXPECT_LT(comparison.efficiency(), 0.9);
  EXPECT_NEAR(comparison.measured_ms - comparison.simulated_ms, 7, 0.1);
  const auto delays = comparison.greatest_delays(5);
  ASSERT_EQ(delays.size(), 5u);
  for (const ActionComparison& action : delays) EXPECT_NEAR(action.delay_ms(), 7, 0.1) << action.action;
  EXPECT_TRUE(has_text(to_text(comparison), "efficiency"));
}

TEST(TraceComparison, OverlappedUnitsAreTimedAsTheyWere) {
  const StepTrace trace = simulated_trace("DualPipeV", 2, 8, 0.5);
  const TraceComparison comparison = compare_with_simulation(trace);
  EXPECT_NEAR(comparison.model.overlap_saving, 0.5, 0.02);
  EXPECT_NEAR(comparison.efficiency(), 1.0, 0.02);
  EXPECT_TRUE(has_text(to_csv(comparison), "|"));
}

TEST(TraceComparison, EventsOfAnotherScheduleAreRefused) {
  StepTrace trace = simulated_trace("1F1B", 2, 4);
  trace.ranks[0].front().actions = {schedule::forward(1, 0)};
  trace.ranks[0].front().kind = TraceEvent::Kind::Compute;
  EXPECT_THROW(compare_with_simulation(trace), ConfigError);
}

}  // namespace step_trace_test
}  // namespace penstock
