// A real run with real observers: metrics, progress and a report.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "penstock/train/job/peak_flops.h"
#include "penstock/train/report/metrics_file.h"
#include "penstock/train/report/progress.h"
#include "penstock/train/report/report_page.h"
#include "penstock/trainer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/train/markup_check.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace observed_run_test {

using namespace train;
using namespace std::chrono_literals;

TrainConfig small_config(const ScratchFolder& folder, int steps) {
  const std::vector<std::string> arguments{"--preset",
                                           "tiny",
                                           "--model.width",
                                           "16",
                                           "--layers",
                                           "4",
                                           "--heads",
                                           "2",
                                           "--key_value_heads",
                                           "2",
                                           "--feed_width",
                                           "32",
                                           "--context",
                                           "16",
                                           "--pp",
                                           "2",
                                           "--schedule",
                                           "1F1B",
                                           "--microbatches",
                                           "4",
                                           "--steps",
                                           std::to_string(steps),
                                           "--validate_every",
                                           "4",
                                           "--validate_batches",
                                           "1",
                                           "--checkpoint.every",
                                           "4",
                                           "--trace_steps",
                                           "3,6",
                                           "--data.sources",
                                           (folder / "text").string(),
                                           "--validation_fraction",
                                           "0.3"};
  return parse_config("", "test", arguments).config;
}

std::string run(const ScratchFolder& folder, const TrainConfig& config) {
  std::string shown;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    MetricsFile metrics;
    ProgressOptions options;
    options.kind = ProgressKind::Lines;
    options.write = [&](const std::string& text) { shown += text; };
    Progress progress(options);
    Trainer trainer(world, config, folder / "run", {&progress, &metrics});
    trainer.run();
  });
  return shown;
}

TEST(ObservedRun, MetricsProgressAndPage) {
  const ScratchFolder folder;
  for (int file = 0; file < 30; ++file)
    folder.write("text/" + std::to_string(file) + ".h",
                 "int value_" + std::to_string(file * 7 % 13) + " = " +
                     std::string(static_cast<std::size_t>(60 + file), '1') + ";\n");
  const std::string shown = run(folder, small_config(folder, 8));
  EXPECT_TRUE(has_text(shown, "on 2 ranks (cpu): pp 2, dp 1, tp 1, 1F1B, 4 microbatches of 2\n"));
  EXPECT_TRUE(has_text(shown, "step 8/8  loss "));
  EXPECT_TRUE(has_text(shown, "MFU "));
  EXPECT_TRUE(has_text(shown, "finished after step 8 of 8"));

  const RunReport report = load_run(folder / "run");
  EXPECT_TRUE(report.notes.empty()) << report.notes.front();
  ASSERT_EQ(report.metrics.steps.size(), 8u);
  EXPECT_EQ(report.metrics.validations.size(), 3u);
  EXPECT_EQ(report.metrics.checkpoints.size(), 2u);
  for (const StepMetrics& step : report.metrics.steps) {
    const StepTimes& times = step.outcome.times;
    EXPECT_GT(step.outcome.loss, 0);
    EXPECT_GT(times.schedule, 0);
    EXPECT_LE(times.data + times.schedule + times.sync + times.update, times.total);
    EXPECT_GT(step.resident_bytes, 0);
  }
  ASSERT_EQ(report.traces.size(), 2u);
  EXPECT_EQ(report.traces[0].step, 3);
  EXPECT_EQ(report.traces[0].ranks.size(), 2u);
  EXPECT_GT(report.traces[0].bubble, 0);
  EXPECT_LT(report.traces[0].bubble, 1);
  const std::string page = report_page({report});
  EXPECT_EQ(markup_problem(page), "");
  EXPECT_EQ(count_of(page, "<g class=\"cell simulated\""), 16u);  // 2 ranks x 4 microbatches x F and B

  // A longer run continues in the same file.
  run(folder, small_config(folder, 10));
  const RunMetrics longer = read_metrics(folder / "run/metrics.jsonl");
  EXPECT_EQ(longer.starts.size(), 2u);
  EXPECT_EQ(longer.starts[1].first_step, 8);
  EXPECT_EQ(longer.steps.size(), 10u);
  EXPECT_EQ(longer.repeated_steps, 0);
}

TEST(PeakFlops, IsTheSumOfTheRanks) {
  EXPECT_GT(product_flops(at::kCPU, "fp32", 0.01), 1e7);
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const double sum = peak_flops(world, at::kCPU, "fp32");
    EXPECT_TRUE(std::isfinite(sum));
    EXPECT_GT(sum, 1e7);
  });
}

}  // namespace observed_run_test
}  // namespace penstock::test
