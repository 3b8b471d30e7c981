// The report page: complete, self-contained, with the numbers of the run and notes about what is missing.
#include "penstock/train/report/report_page.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/report/report_chart.h"
#include "penstock/train/report/report_timeline.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/markup_check.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/synthetic_run.h"

namespace penstock::test {
namespace report_test {

using namespace train;

// Without the style sheet and the script.
std::string body_of(const std::string& page) {
  return page.substr(page.find("<main>"), page.find("</main>") - page.find("<main>"));
}

// The page is too long to be printed when something is missing from it.
::testing::AssertionResult page_has(const std::string& page, const std::string& part) {
  if (page.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << part << "\" is not on the page";
}

TEST(MarkupCheck, FindsWhatIsWrong) {
  EXPECT_EQ(markup_problem("<!doctype html><p class=\"a\">text<br></p><svg><path d=\"M 0\"/></svg>"), "");
  EXPECT_NE(markup_problem("<p><b></p></b>"), "");
  EXPECT_NE(markup_problem("<p>"), "");
  EXPECT_NE(markup_problem("a > b"), "");
  EXPECT_NE(markup_problem("<p title=\"a>"), "");
}

TEST(ReportPage, OneRun) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  const RunReport run = load_run(folder / "first");
  EXPECT_EQ(run.name, "first");
  EXPECT_EQ(run.state(), "finished, 200 of 200 steps");
  EXPECT_TRUE(run.notes.empty());
  EXPECT_NEAR(run.numbers.times.total, 0.252, 1e-3);
  EXPECT_NEAR(run.numbers.tokens_per_second, 4096 / run.numbers.times.total, 1e-6);
  EXPECT_NEAR(run.numbers.outside_schedule, 1 - run.numbers.times.schedule / run.numbers.times.total, 1e-12);
  EXPECT_NEAR(run.numbers.mfu, run.numbers.tokens_per_second * 7.5e6 / 3e11, 1e-12);
  const std::string page = report_page({run});
  EXPECT_EQ(markup_problem(page), "");
  EXPECT_EQ(count_of(page, "<svg class=\"chart\""), 6u);
  EXPECT_EQ(count_of(page, "<svg class=\"timeline\""), 1u);
  // 2 ranks x 8 microbatches x F and B, measured and simulated.
  EXPECT_EQ(count_of(page, "<g class=\"cell\" data-m=\"0\""), 4u);
  EXPECT_EQ(count_of(page, "<g class=\"cell simulated\""), 32u);
  EXPECT_TRUE(page_has(page, "Training run first<span class=\"state\">finished</span>"));
  EXPECT_TRUE(page_has(
      page, fmt::format("<strong>{:.4f}</strong><span>mean of the last 20 steps", run.numbers.loss)));
  EXPECT_TRUE(page_has(page, fmt::format("<strong>{:.4f}</strong><span>best", made_loss(200) + 0.1)));
  EXPECT_TRUE(page_has(page, "<strong>13 ms</strong><span>longest of 2"));
  EXPECT_TRUE(page_has(page, "1.23 M parameters, 2 ranks on cpu, 200 of 200 steps"));
  EXPECT_TRUE(page_has(page, "started 2023-11-14 22:13 UTC"));
  EXPECT_TRUE(page_has(page, "<td>embed, blocks 0-1, 0.605 M parameters</td>"));
  EXPECT_TRUE(page_has(page, "<code>schedule</code></td><td><code>&quot;1F1B&quot;</code>"));
  EXPECT_TRUE(page_has(page, "traces/step-10.json"));
  EXPECT_TRUE(page_has(page, "2 ranks, 2 stages, 8 microbatches"));
  EXPECT_EQ(count_of(page, "class=\"notes\""), 0u);
}

// By name: a table with weights, and a chart of each loss; runs without any have none.
TEST(ReportPage, AuxiliaryLosses) {
  const ScratchFolder folder;
  const auto make = [&](const std::string& name, bool with_depths) {
    MetricsFile file;
    file.on_start(made_description(folder / name));
    for (std::int64_t step = 1; step <= 40; ++step) {
      StepOutcome outcome = made_step(step);
      outcome.auxiliary = {{.name = "balance", .value = step <= 20 ? 9.0 : 1.25, .weight = 0.5}};
      if (with_depths) outcome.auxiliary.push_back({.name = "<depth>", .value = 0.75, .weight = 0.25});
      file.on_step(outcome, made_extras(step));
    }
    return load_run(folder / name);
  };
  const RunReport run = make("first", true);
  ASSERT_EQ(run.numbers.auxiliary.size(), 2u);
  EXPECT_EQ(run.numbers.auxiliary[0].value, 1.25);  // of the last 20 steps
  EXPECT_EQ(run.numbers.auxiliary[1].weight, 0.25);
  EXPECT_TRUE(
      has_text(summary_text(run), "auxiliary   balance 1.25 (weight 0.5), <depth> 0.75 (weight 0.25)"));
  const std::string page = report_page({run});
  EXPECT_EQ(markup_problem(page), "");
  EXPECT_EQ(count_of(page, "<svg class=\"chart\""), 8u);
  EXPECT_TRUE(page_has(page, "<h2>Auxiliary losses</h2>"));
  const double whole = run.numbers.loss + 0.5 * 1.25 + 0.25 * 0.75;
  EXPECT_TRUE(
      page_has(page, fmt::format("<td>balance</td><td class=\"n\">1.25</td><td class=\"n\">0.5</td><td "
                                 "class=\"n\">{:.1f} %</td>",
                                 100 * 0.5 * 1.25 / whole)));
  EXPECT_TRUE(page_has(page, "<td>&lt;depth&gt;</td>"));
  const std::string both = report_page({run, make("second", false)});
  EXPECT_EQ(markup_problem(both), "");
  EXPECT_TRUE(page_has(both, "<th class=\"n\">second weight</th>"));
  EXPECT_TRUE(page_has(both, "<td class=\"n\">none</td>"));
  make_run_folder(folder / "third", {});
  EXPECT_EQ(count_of(report_page({load_run(folder / "third")}), "Auxiliary losses"), 0u);
}

TEST(ReportPage, NeedsNoNetwork) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  const std::string page = report_page({load_run(folder / "first")});
  for (const char* outside : {" src=", "href=", "@import", "url(", "https://", "fetch(", "import("})
    EXPECT_EQ(count_of(page, outside), 0u) << outside;
  EXPECT_EQ(count_of(page, "http://"), 1u);  // the SVG namespace
  EXPECT_TRUE(page_has(page, "prefers-color-scheme:dark"));
}

TEST(ReportPage, SeveralRuns) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  make_run_folder(folder / "second", {.schedule = "ZBVZeroBubble", .slower = 2},
                  [](RunDescription& run) { run.config.training.lr = 0.25; });
  make_run_folder(folder / "third", {.last_step = 120, .ends = false, .traces = false});
  const std::vector<RunReport> runs{load_run(folder / "first"), load_run(folder / "second"),
                                    load_run(folder / "third")};
  const std::string page = report_page(runs);
  EXPECT_EQ(markup_problem(page), "");
  EXPECT_TRUE(page_has(page, "3 training runs compared"));
  EXPECT_EQ(count_of(page, "<svg class=\"timeline\""), 2u);
  EXPECT_TRUE(page_has(page,
                       "<tr><td><code>training.lr</code></td><td class=\"n\"><code>0.002</code></td><td "
                       "class=\"n\"><code>0.25</code></td><td class=\"n\"><code>0.002</code></td></tr>"));
  EXPECT_TRUE(page_has(page, "<td><code>layout.schedule</code></td>"));
  EXPECT_EQ(count_of(page, "<td><code>layout.pp</code></td>"), 0u);
  EXPECT_TRUE(page_has(page,
                       "<td>speed relative to the first</td><td class=\"n\">1.00 x</td><td class=\"n\">0.50 "
                       "x</td><td class=\"n\">1.00 x</td>"));
  EXPECT_TRUE(page_has(page,
                       "<td>end</td><td class=\"n\">finished</td><td class=\"n\">finished</td><td "
                       "class=\"n\">unfinished</td>"));
  EXPECT_TRUE(page_has(page, "Notes of third"));
  EXPECT_EQ(count_of(page, "<path class=\"curve c3\""), 6u);  // loss, lr, norm, speed, time, memory
  EXPECT_EQ(count_of(page, "<path class=\"curve c3 dotted\""), 1u);
  EXPECT_EQ(count_of(page, "<path class=\"curve c1\" style=\"stroke-width:5\""),
            3u);  // visible below coinciding curves
}

TEST(ReportPage, RunsOfTheSameNameAreShownByPath) {
  const ScratchFolder folder;
  make_run_folder(folder / "a/run", {.last_step = 20});
  make_run_folder(folder / "b/run", {.last_step = 20});
  const std::string page = report_page({load_run(folder / "a/run"), load_run(folder / "b/run")});
  EXPECT_TRUE(page_has(page, "Pipeline step of " + (folder / "a/run").string()));
  EXPECT_TRUE(page_has(page, "Pipeline step of " + (folder / "b/run").string()));
}

TEST(ReportPage, SaysWhatIsMissing) {
  const ScratchFolder folder;
  make_run_folder(folder / "killed", {.last_step = 30, .ends = false, .validates = false, .traces = false},
                  [](RunDescription& run) {
                    run.partition.clear();
                    run.peak_flops = 0;
                  });
  const auto path = folder / "killed/metrics.jsonl";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 20);
  const RunReport run = load_run(folder / "killed");
  EXPECT_EQ(run.state(), "unfinished (killed, failed or still running), 29 of 200 steps");
  const std::string page = report_page({run});
  EXPECT_EQ(markup_problem(page), "");
  for (const char* missing :
       {"The run is unfinished", "is incomplete", "There was no validation", "No checkpoint was written.",
        "No step was traced", "The peak performance of this machine was not measured",
        "did not record the partition", "There is no step trace"})
    EXPECT_TRUE(page_has(page, missing));
  EXPECT_TRUE(page_has(page, "<span class=\"state open\">unfinished</span>"));
  EXPECT_TRUE(has_text(summary_text(run), "note        No step was traced"));
}

TEST(ReportPage, ARunWithoutAnyStep) {
  const ScratchFolder folder;
  make_run_folder(folder / "begun", {.last_step = 0, .ends = false, .validates = false});
  const std::string page = report_page({load_run(folder / "begun")});
  EXPECT_EQ(markup_problem(page), "");
  EXPECT_TRUE(page_has(page, "No steps were recorded"));
  EXPECT_TRUE(page_has(page, "no data recorded"));
  EXPECT_EQ(count_of(page, "<svg class=\"chart\""), 0u);
  EXPECT_EQ(count_of(body_of(page), "nan"), 0u);
}

TEST(ReportPage, ATraceThatCannotBeReadIsANote) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  folder.write("first/traces/step-10.json", "{}");
  std::filesystem::remove(folder / "first/traces/step-100.json");
  const RunReport run = load_run(folder / "first");
  EXPECT_TRUE(run.traces.empty());
  ASSERT_EQ(run.notes.size(), 2u);
  EXPECT_TRUE(has_text(run.notes[0], "The trace of step 10 cannot be shown"));
  EXPECT_TRUE(has_text(run.notes[1], "step-100.json"));
  EXPECT_EQ(markup_problem(report_page({run})), "");
}

TEST(ReportPage, TextsOfARunAreEscaped) {
  const ScratchFolder folder;
  const std::string evil = "</script><script>alert(\"1\")</script>&<b>";
  make_run_folder(folder / "<i>run", {}, [&](RunDescription& run) {
    run.config.model.pattern = evil;
    run.config.output.sample_prompt = evil;
    run.device = evil;
    run.libtorch = evil;
    run.partition = {"stage 0: " + evil, evil};
  });
  for (const std::string& page : {report_page({load_run(folder / "<i>run")}),
                                  report_page({load_run(folder / "<i>run"), load_run(folder / "<i>run")})}) {
    EXPECT_EQ(markup_problem(page), "");
    EXPECT_EQ(count_of(page, "<script>"), 1u);
    EXPECT_EQ(count_of(page, "alert(\""), 0u);
    EXPECT_EQ(count_of(page, "<i>run"), 0u);
    EXPECT_TRUE(page_has(page, "&lt;i&gt;run"));
    EXPECT_TRUE(page_has(page, "&lt;/script&gt;&lt;script&gt;alert("));
  }
}

TEST(ReportPage, RefusesNoRunsAndFoldersWithoutARun) {
  EXPECT_TRUE(has_text(message_of<ValueError>([] { report_page({}); }), "give the folder of a run"));
  const ScratchFolder folder;
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { load_run(folder / "absent"); }), "a folder with metrics.jsonl"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { write_page(folder / "absent/report.html", "page"); }),
                       "a file that can be written"));
}

TEST(ReportPage, IsWrittenIntoTheFolder) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  EXPECT_EQ(write_report(folder / "first"), folder / "first/report.html");
  EXPECT_EQ(write_report(folder / "first/metrics.jsonl"), folder / "first/report.html");
  const auto bytes = read_bytes(folder / "first/report.html");
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), report_page({load_run(folder / "first")}));
  EXPECT_FALSE(std::filesystem::exists(folder / "first/report.html.tmp"));
}

TEST(TraceReport, PartsOfEveryRankAddUpToTheStep) {
  for (const char* kind : {"1F1B", "GPipe", "ZBVZeroBubble", "DualPipeV"}) {
    const TraceReport report = report_trace(simulated_trace(kind, 2, 8));
    const double step = static_cast<double>(report.trace.duration_ns()) / 1e6;
    double compute = 0;
    for (const RankTimes& rank : report.ranks) {
      EXPECT_NEAR(rank.compute + rank.communication + rank.wait + rank.rest, step, 1e-6) << kind;
      EXPECT_GT(rank.compute, 0);
      compute += rank.compute;
    }
    EXPECT_NEAR(report.bubble, 1 - compute / (2 * step), 1e-9) << kind;
  }
  // A step that runs as simulated has the simulated bubble: 2 stages of 3 and 3.75 ms per microbatch.
  const TraceReport report = report_trace(simulated_trace("1F1B", 2, 8));
  EXPECT_NEAR(report.bubble, report.simulated_bubble, 1e-6);
  EXPECT_NEAR(report.ranks[0].compute, 8 * 3.0, 1e-6);
  EXPECT_NEAR(report.ranks[1].compute, 8 * 3.75, 1e-6);
}

TEST(Timeline, EveryKindOfSchedule) {
  for (const char* kind : {"1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    const std::string picture = draw_timeline(report_trace(simulated_trace(kind, 4, 16)));
    EXPECT_EQ(markup_problem(picture), "") << kind;
    EXPECT_EQ(count_of(picture, "class=\"label end\""), 4u);
    EXPECT_GT(count_of(picture, "<b class=\"lane\">"), 0u);
  }
  EXPECT_TRUE(has_text(draw_timeline(report_trace(simulated_trace("ZBVZeroBubble", 2, 4))).substr(0, 900),
                       "W weight gradient"));
}

TEST(ChartText, CurvesAxesAndGaps) {
  Chart chart{.title = "a < b", .series = {}};
  EXPECT_TRUE(has_text(draw_chart(chart), "no data recorded"));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  chart.series.push_back({.name = "one",
                          .colour = 9,
                          .look = ChartSeries::Look::Line,
                          .x = {1, 2, 3, 4, 5},
                          .y = {1, 2, nan, 4, 5}});
  const std::string picture = draw_chart(chart);
  EXPECT_EQ(markup_problem(picture), "");
  EXPECT_TRUE(has_text(picture, "a &lt; b"));
  EXPECT_TRUE(has_text(picture, "class=\"curve c1\""));  // colours wrap around
  const std::size_t path = picture.find(" d=\"");
  EXPECT_EQ(count_of(picture.substr(path, picture.find('/', path) - path), "M"), 2u);
  EXPECT_TRUE(has_text(picture, "&quot;points&quot;:[1,1,2,2,4,4,5,5]"));
  chart.series[0] = {.name = "flat", .colour = 1, .look = ChartSeries::Look::Points, .x = {7}, .y = {0}};
  EXPECT_EQ(count_of(draw_chart(chart), "<circle"), 1u);
  EXPECT_EQ(count_of(draw_chart(chart), "nan"), 0u);
  chart.logarithmic = true;
  chart.series[0] = {
      .name = "wide", .colour = 1, .look = ChartSeries::Look::Line, .x = {1, 2}, .y = {0.01, 100}};
  EXPECT_TRUE(has_text(draw_chart(chart), "&quot;log&quot;:true"));
}

TEST(ChartText, ThinningKeepsTheExtremes) {
  ChartSeries series{.name = "long", .colour = 1, .look = ChartSeries::Look::Line, .x = {}, .y = {}};
  for (int i = 0; i < 100000; ++i) {
    series.x.push_back(i);
    series.y.push_back(i == 54321 ? 9 : i == 12345 ? -9 : std::sin(i));
  }
  const ChartSeries thin = thinned(series, 1000);
  EXPECT_LE(thin.x.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(thin.x.begin(), thin.x.end()));
  EXPECT_NE(std::find(thin.y.begin(), thin.y.end(), 9), thin.y.end());
  EXPECT_NE(std::find(thin.y.begin(), thin.y.end(), -9), thin.y.end());
}

TEST(Smoothing, MeansOfNeighbours) {
  EXPECT_EQ(smoothed({3, 3, 3}, 5), (std::vector<double>{3, 3, 3}));
  EXPECT_TRUE(smoothed({}, 5).empty());
  std::vector<double> line, step(100, 1.0);
  for (int i = 0; i < 100; ++i) line.push_back(i);
  const std::vector<double> same = smoothed(line, 5);
  for (int i = 0; i < 100; ++i)
    EXPECT_NEAR(same[static_cast<std::size_t>(i)], i, 1e-9);  // a straight line is unchanged
  std::fill(step.begin() + 50, step.end(), 0.0);
  const auto smooth = smoothed(step, 9);
  EXPECT_DOUBLE_EQ(smooth[45], 1);
  EXPECT_NEAR(smooth[50], 4.0 / 9, 1e-9);
  EXPECT_NEAR(smooth[54], 0, 1e-9);
  EXPECT_EQ(smoothed({2, std::numeric_limits<double>::quiet_NaN(), 2}, 5)[1], 2);
}

TEST(Median, OfWhatIsFinite) {
  EXPECT_EQ(median_of({}), 0);
  EXPECT_EQ(median_of({3, 1, std::numeric_limits<double>::infinity(), 2}), 2);
  EXPECT_EQ(median_of({1, 2, 3, 10}), 2.5);
}

}  // namespace report_test
}  // namespace penstock::test
