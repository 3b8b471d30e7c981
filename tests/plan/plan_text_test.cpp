// Costs as text, reports and drawings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "penstock/draw.h"
#include "penstock/lower.h"
#include "penstock/plan/cost/cost_text.h"
#include "penstock/plan/simulate/simulation_report.h"
#include "tests/plan/shapes.h"

namespace penstock::plan::test {
namespace plan_text_test {

using schedule::Schedule;
using schedule::ScheduleKind;
using ::testing::HasSubstr;
using ::testing::Not;

std::string error_of(const std::string& cost) {
  CostModel model;
  try {
    apply_cost_text(model, cost);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

template <class Call>
std::string test_message(Call&& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no error";
}

TEST(CostText, SetsTheNamedEntries) {
  CostModel model;
  apply_cost_text(model, "F=1.5,i=2,W=0.5:1:1.5,send=0.1,overlap=0.25,bytes=64K,bandwidth=1M");
  ASSERT_EQ(model.stages.size(), 3U);
  EXPECT_EQ(model.stages[2].forward, 1.5);
  EXPECT_EQ(model.stages[2].backward_input, 2);
  EXPECT_EQ(model.stages[2].backward_weight, 1.5);
  EXPECT_EQ(model.time_of(schedule::ActionKind::Backward, 0), 2.5);
  EXPECT_DOUBLE_EQ(model.transfer_time(0), 0.1 + 65536.0 / 1048576);
  apply_memory_text(model, "params=2G,grads=1.5K,act=7:8:9,split=3");
  EXPECT_EQ(model.memory_of(1).parameters, std::int64_t{2} << 30);
  EXPECT_EQ(model.memory_of(1).gradients, 1536);
  EXPECT_EQ(model.memory_of(2).activation, 9);
  EXPECT_EQ(model.memory_of(2).between_input_and_weight, 3);
}

TEST(CostText, NumbersAreFinite) {
  for (const char* name : {"F", "I", "W", "B", "send", "bytes", "bandwidth", "unshard", "reduce", "overlap"})
    for (const char* bad : {"nan", "inf", "-inf", "1e999", "", "3x", "-1", "1e300"}) {
      if (std::string_view(bad) == "1e300" && std::string_view(name) == "bandwidth") continue;  // a fast link
      EXPECT_THAT(error_of(std::string(name) + "=" + bad), HasSubstr(std::string("cost: ") + name)) << bad;
    }
  for (const char* name : {"params", "unsharded", "grads", "act", "split"})
    for (const char* bad : {"nan", "inf", "-inf", "1e999", "", "3x", "-1", "-1K", "1.5", "9E"}) {
      CostModel model;
      EXPECT_THROW(apply_memory_text(model, std::string(name) + "=" + bad), ConfigError)
          << name << "=" << bad;
    }
  CostModel model;
  apply_cost_text(model, "bandwidth=0.4");
  EXPECT_EQ(model.bandwidth, 0.4) << "not rounded to whole bytes";
}

TEST(CostText, SumsThatOverflowAreRefused) {
  const Schedule schedule =
      schedule::generate(ScheduleKind::OneFOneB,
                         {.ranks = 2, .stages_per_rank = 1, .microbatches = 4, .group_size = std::nullopt});
  CostModel model;
  model.stages[0].forward = 1e308;
  EXPECT_THROW(simulate(schedule, model), ValueError);
  model.stages[0].forward = 1e100;
  EXPECT_TRUE(std::isfinite(simulate(schedule, model).time));
  model = {};
  model.memory[0].activation = std::int64_t{1} << 61;
  EXPECT_THAT((test_message([&] { simulate(schedule, model); })), HasSubstr("less than 4 EiB"));
  model.memory[0].activation = std::int64_t{1} << 59;
  EXPECT_EQ(simulate(schedule, model).peak_bytes(), std::int64_t{1} << 60);
  model = {};
  model.stages[0].output_bytes = 1e18;
  model.bandwidth = 1e-300;
  EXPECT_THROW(simulate(schedule, model), ValueError);
}

TEST(CostText, ErrorsNameTheEntryAndTheNearestName) {
  EXPECT_THAT(error_of("sned=1"), HasSubstr("did you mean send?"));
  EXPECT_THAT(error_of("F=fast"), HasSubstr("cost: F: got \"fast\""));
  EXPECT_THAT(error_of("F=1,W=-1"), HasSubstr("cost: W"));
  EXPECT_THAT(error_of("F"), HasSubstr("name=value"));
  EXPECT_THAT(error_of("F=1:2,W=1:2:3"), HasSubstr("3 values"));
  EXPECT_THAT(error_of("overlap=2"), HasSubstr("0 to 1"));
  EXPECT_THAT(error_of("F=nan"), HasSubstr("got \"nan\""));
  EXPECT_THROW(parse_bytes_list("limit", "12Q"), ConfigError);
  EXPECT_THROW(parse_bytes_list("limit", ""), ConfigError);
}

TEST(Grid, OneColumnPerStep) {
  EXPECT_EQ(draw_grid(generate(ScheduleKind::OneFOneB, shape(2, 1, 2))),
            "rank 0 | 0F0 0F1 .   0B0 .   0B1\n"
            "rank 1 | .   1F0 1B0 1F1 1B1\n");
  EXPECT_THAT(draw_grid(generate(ScheduleKind::OneFOneB, shape(2, 1, 2)), {.colour = true}),
              HasSubstr("\x1b[48;5;"));
}

TEST(Report, JsonHasItsKeys) {
  const Schedule schedule = generate(ScheduleKind::OneFOneB, shape(2, 1, 4));
  const auto document = nlohmann::json::parse(to_json(schedule, simulate(schedule, CostModel{})));
  EXPECT_DOUBLE_EQ(document.at("time"), 15);
  EXPECT_DOUBLE_EQ(document.at("bubble"), 0.2);
  EXPECT_NEAR(document.at("span_bubble"), 1.0 / 9, 1e-12);
  ASSERT_EQ(document.at("per_rank").size(), 2U);
  EXPECT_DOUBLE_EQ(document.at("per_rank")[1].at("busy"), 12);
  EXPECT_DOUBLE_EQ(document.at("per_rank")[1].at("idle"), 3);
  EXPECT_EQ(document.at("per_rank")[0].at("peak_activations"), 2);
  EXPECT_EQ(document.at("per_rank")[0].at("peak_bytes"), 0);
  EXPECT_EQ(document.at("critical_path")[0].at("action"), "0F0");
  EXPECT_EQ(document.at("critical_path").back().at("end"), 15);
}

class Drawings : public ::testing::TestWithParam<ScheduleKind> {
 protected:
  // Compute-only and lowered.
  std::vector<Schedule> forms() const {
    const int chunks = required_stages_per_rank(GetParam()).value_or(2);
    const Schedule compute = generate(GetParam(), shape(4, chunks, 8));
    return {compute, schedule::lower(compute)};
  }
  static CostModel model() {
    CostModel model;
    model.latency = 0.1;
    model.memory = {{.parameters = 1 << 20, .activation = 1 << 16}};
    return model;
  }
};

std::size_t count(std::string_view text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + part.size()))
    ++found;
  return found;
}

std::size_t timed_slots(const Schedule& schedule, const Simulation& simulation) {
  std::size_t slots = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (std::size_t slot = 0; slot < schedule.row(rank).size(); ++slot) {
      const TimedSlot& timed = simulation.slots[static_cast<std::size_t>(rank)][slot];
      if (!schedule.row(rank)[slot].empty() && timed.end > timed.start) ++slots;
    }
  }
  return slots;
}

TEST_P(Drawings, SvgHasACellWithHoverForEveryAction) {
  for (const Schedule& schedule : forms()) {
    const Simulation simulation = simulate(schedule, model());
    const std::string svg = draw_svg({schedule, simulation, "a <title> & more"});
    EXPECT_THAT(svg, HasSubstr("a &lt;title&gt; &amp; more"));
    EXPECT_EQ(count(svg, "<title>"), timed_slots(schedule, simulation));
    EXPECT_EQ(count(svg, "waited for"), timed_slots(schedule, simulation));
    EXPECT_EQ(count(svg, "<g"), count(svg, "</g>"));
    EXPECT_EQ(count(svg, "<text"), count(svg, "</text>"));
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
  }
}

TEST_P(Drawings, HtmlIsSelfContained) {
  for (const Schedule& schedule : forms()) {
    const Simulation simulation = simulate(schedule, model(), {.memory_curve = true});
    const std::string html = draw_html({schedule, simulation, "name"});
    EXPECT_EQ(count(html, "data-tip=\""), timed_slots(schedule, simulation));
    EXPECT_EQ(count(html, "http"), count(html, "http://www.w3.org/2000/svg"));
    EXPECT_THAT(html, HasSubstr("Memory over time"));
  }
}

TEST_P(Drawings, PerfettoEventsHaveTheirKeys) {
  for (const Schedule& schedule : forms()) {
    const Simulation simulation = simulate(schedule, model(), {.memory_curve = true});
    const auto document = nlohmann::json::parse(draw_perfetto({schedule, simulation, "name"}));
    std::size_t slices = 0;
    std::multiset<std::int64_t> arrows;
    for (const auto& event : document.at("traceEvents")) {
      const std::string phase = event.at("ph");
      EXPECT_TRUE(event.at("name").is_string());
      EXPECT_TRUE(event.at("pid").is_number_integer());
      EXPECT_TRUE(event.at("tid").is_number_integer());
      if (phase != "M") {
        EXPECT_GE(event.at("ts").get<double>(), 0);
      }
      if (phase == "X") {
        ++slices;
        EXPECT_GE(event.at("dur").get<double>(), 0);
        EXPECT_TRUE(event.at("args").contains("waited_for"));
      } else if (phase == "s" || phase == "f") {
        arrows.insert(event.at("id").get<std::int64_t>());
      } else {
        EXPECT_TRUE(phase == "M" || phase == "C") << phase;
      }
    }
    std::size_t slots = 0;
    for (const schedule::Row& row : schedule.rows()) slots += row.size() - row.idle_slots();
    EXPECT_EQ(slices, slots);
    for (const std::int64_t id : arrows) EXPECT_EQ(arrows.count(id), 2U);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Drawings, ::testing::ValuesIn(schedule::all_schedule_kinds()));

}  // namespace plan_text_test
}  // namespace penstock::plan::test
