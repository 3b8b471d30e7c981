// metrics.jsonl: writing, reading, resuming, damage.
#include "penstock/train/report/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <limits>
#include <string>
#include <vector>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"
#include "penstock/train/report/metrics_file.h"
#include "penstock/train/report/report_page.h"
#include "penstock/train/report/run_report.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/synthetic_run.h"

namespace penstock::test {
namespace metrics_test {

using namespace train;

std::string text_of(const std::filesystem::path& path) {
  const std::vector<std::uint8_t> bytes = read_bytes(path);
  return {bytes.begin(), bytes.end()};
}

// A file of 120 steps without an end record.
std::filesystem::path unfinished_run(const ScratchFolder& folder) {
  double now = 1000;
  MetricsFile file([&] { return now += 0.25; });
  file.on_start(made_description(folder.path()));
  tell_steps(file, 0, 120);
  return folder / "metrics.jsonl";
}

TEST(Metrics, RoundTrip) {
  const ScratchFolder folder;
  double now = 1000;
  MetricsFile file([&] { return now += 0.25; });
  RunDescription run = made_description(folder.path());
  run.config.model.pattern = "A\"|<A>\n";
  file.on_start(run);
  file.on_validation(0, 5.7, 0.75);
  tell_steps(file, 0, 200);
  file.on_trace(10, folder / "traces/step-00000010.json");
  file.on_end(RunEnd::TimeLimit, 200);

  const RunMetrics metrics = read_metrics(folder / "metrics.jsonl");
  ASSERT_EQ(metrics.starts.size(), 1u);
  const StartMetrics& start = metrics.starts[0];
  EXPECT_EQ(start.time, 1000.25);
  EXPECT_EQ(start.steps, 200);
  EXPECT_EQ(start.ranks, 2);
  EXPECT_EQ(start.device, "cpu");
  EXPECT_EQ(start.libtorch, "1.13.0");
  EXPECT_EQ(start.parameters, 1234567);
  EXPECT_EQ(start.flops_per_token, 7.5e6);
  EXPECT_EQ(start.peak_flops, 3e11);
  EXPECT_EQ(start.partition, run.partition);
  EXPECT_EQ(start.tokens_per_step, 4096);
  EXPECT_EQ(start.training_tokens, 15000000u);
  EXPECT_EQ(start.validation_tokens, 800000u);
  EXPECT_EQ(start.config.size(), config_fields().size());
  EXPECT_EQ(start.value("layout.pp"), "2");
  EXPECT_EQ(start.value("training.betas"), "[0.9, 0.95]");
  EXPECT_EQ(start.value("layout.schedule"), "\"1F1B\"");
  EXPECT_EQ(start.value("model.pattern"), "\"A\\\"|<A>\\n\"");
  EXPECT_EQ(start.value("model.tie_head"), "true");
  EXPECT_EQ(start.value("model.nothing"), "");
  ASSERT_EQ(metrics.steps.size(), 200u);
  for (std::int64_t step = 1; step <= 200; ++step) {
    const StepMetrics& read = metrics.steps[static_cast<std::size_t>(step - 1)];
    const StepOutcome told = made_step(step);
    EXPECT_EQ(read.outcome.step, step);
    EXPECT_EQ(read.outcome.loss, told.loss);  // all digits
    EXPECT_EQ(read.outcome.grad_norm, told.grad_norm);
    EXPECT_EQ(read.outcome.lr, told.lr);
    EXPECT_EQ(read.outcome.loss_scale, 1);
    EXPECT_FALSE(read.outcome.skipped);
    EXPECT_EQ(read.outcome.tokens, 4096);
    EXPECT_EQ(read.outcome.times.data, told.times.data);
    EXPECT_EQ(read.outcome.times.schedule, told.times.schedule);
    EXPECT_EQ(read.outcome.times.sync, told.times.sync);
    EXPECT_EQ(read.outcome.times.update, told.times.update);
    EXPECT_EQ(read.outcome.times.total, told.times.total);
    EXPECT_EQ(read.tokens_per_second, made_extras(step).tokens_per_second);
    EXPECT_EQ(read.resident_bytes, made_extras(step).resident_bytes);
  }
  ASSERT_EQ(metrics.validations.size(), 5u);
  EXPECT_EQ(metrics.validations[0].loss, 5.7);
  EXPECT_EQ(metrics.validations[4].step, 200);
  EXPECT_EQ(metrics.validations[4].seconds, 0.8);
  ASSERT_EQ(metrics.checkpoints.size(), 2u);
  EXPECT_DOUBLE_EQ(metrics.checkpoints[1].stall.total(), 0.013);
  ASSERT_EQ(metrics.traces.size(), 1u);
  EXPECT_EQ(metrics.traces[0].path, "traces/step-00000010.json");
  ASSERT_TRUE(metrics.end.has_value());
  EXPECT_EQ(metrics.end->end, RunEnd::TimeLimit);
  EXPECT_FALSE(metrics.truncated);
}

TEST(Metrics, LinesAsDocumented) {
  StepOutcome outcome;
  outcome.step = 3;
  outcome.loss = 2.5;
  outcome.grad_norm = std::numeric_limits<double>::infinity();
  outcome.lr = 0.001;
  outcome.loss_scale = 65536;
  outcome.skipped = true;
  outcome.tokens = 4096;
  outcome.times = {.data = 0.25, .schedule = 0.5, .sync = 0.125, .update = 0.0625, .total = 1};
  EXPECT_EQ(step_line(outcome, {.tokens_per_second = 4096, .resident_bytes = 7, .device_bytes = 8}, 1.5),
            "{\"type\":\"step\",\"step\":3,\"loss\":2.5,\"grad_norm\":null,\"lr\":0.001,\"loss_scale\":65536."
            "0,\"skipped\":true,\"tokens\":4096,\"tokens_per_second\":4096.0,"
            "\"times\":{\"data\":0.25,\"schedule\":0.5,\"sync\":0.125,\"update\":0.0625,\"total\":1.0},"
            "\"resident_bytes\":7,\"device_bytes\":8,\"time\":1.5}\n");
  EXPECT_EQ(validation_line({.time = 2, .step = 50, .loss = 2.5, .seconds = 0.5}),
            "{\"type\":\"validation\",\"step\":50,\"loss\":2.5,\"seconds\":0.5,\"time\":2.0}\n");
  EXPECT_EQ(
      checkpoint_line({.time = 2, .step = 50, .stall = {.waiting = 0.5, .planning = 0.25, .copying = 1}}),
      "{\"type\":\"checkpoint\",\"step\":50,\"waiting\":0.5,\"planning\":0.25,\"copying\":1.0,\"time\":2.0}"
      "\n");
  EXPECT_EQ(trace_line({.time = 2, .step = 10, .path = "traces/a\xff.json"}),
            "{\"type\":\"trace\",\"step\":10,\"path\":\"traces/a\xEF\xBF\xBD.json\",\"time\":2.0}\n");
  EXPECT_EQ(end_line({.time = 2, .step = 10, .end = RunEnd::Stopped}),
            "{\"type\":\"end\",\"step\":10,\"end\":\"stopped\",\"time\":2.0}\n");
}

TEST(Metrics, AuxiliaryLossesAreWrittenAndReadByName) {
  StepOutcome outcome = made_step(1);
  outcome.auxiliary = {{.name = "router_z", .value = 0.125, .weight = 0.001},
                       {.name = "balance", .value = 1.0625, .weight = 0.01}};
  const std::string line = step_line(outcome, {}, 1.5);
  EXPECT_TRUE(has_text(line,
                       "\"device_bytes\":0,\"auxiliary\":{\"router_z\":{\"value\":0.125,\"weight\":0.001},"
                       "\"balance\":{\"value\":1.0625,\"weight\":0.01}},\"time\":1.5}"))
      << line;
  const ScratchFolder folder;
  {
    MetricsFile file;
    file.on_start(made_description(folder.path()));
    file.on_step(outcome, {});
    outcome.step = 2;
    outcome.auxiliary[0].value = std::numeric_limits<double>::quiet_NaN();
    file.on_step(outcome, {});
    file.on_step(made_step(3), {});
  }
  const RunMetrics metrics = read_metrics(folder / "metrics.jsonl");
  const std::vector<LossTerm>& read = metrics.steps.at(0).outcome.auxiliary;
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].name, "router_z");
  EXPECT_EQ(read[1].value, 1.0625);
  EXPECT_EQ(read[1].weight, 0.01);
  EXPECT_TRUE(std::isnan(metrics.steps.at(1).outcome.auxiliary.at(0).value));
  EXPECT_TRUE(metrics.steps.at(2).outcome.auxiliary.empty());
}

TEST(Metrics, GraphsAreWrittenAndRead) {
  StepOutcome outcome = made_step(1);
  outcome.compiled = {
      {.stage = 2, .graph = 3, .nodes = 40, .deferred = 7, .seconds = 0.5, .reason = "args[0] has sizes [1]"},
      {.stage = 1, .graph = 1, .nodes = 30, .seconds = 0.25, .source = "cache"}};
  outcome.first_captures = 4;
  outcome.recaptures = 1;
  outcome.loads = 2;
  EXPECT_TRUE(has_text(
      step_line(outcome, {}, 1.5),
      "\"compiled\":{\"first\":4,\"again\":1,\"loaded\":2,\"here\":[{\"stage\":2,\"graph\":3,\"nodes\":40,"
      "\"deferred\":7,\"seconds\":0.5,\"reason\":\"args[0] has sizes [1]\",\"source\":\"captured\"},"));
  EXPECT_EQ(step_line(made_step(2), {}, 1.5).find("compiled"), std::string::npos);
  const ScratchFolder folder;
  {
    MetricsFile file;
    file.on_start(made_description(folder.path()));
    file.on_step(outcome, {});
    file.on_step(made_step(2), {});
  }
  const RunReport run = load_run(folder.path());
  const StepOutcome& read = run.metrics.steps.at(0).outcome;
  EXPECT_EQ(read.first_captures, 4);
  EXPECT_EQ(read.recaptures, 1);
  EXPECT_EQ(read.loads, 2);
  ASSERT_EQ(read.compiled.size(), 2u);
  EXPECT_EQ(read.compiled[0].source, "captured");
  EXPECT_EQ(read.compiled[1].source, "cache");
  EXPECT_EQ(read.compiled[0].stage, 2);
  EXPECT_EQ(read.compiled[0].graph, 3);
  EXPECT_EQ(read.compiled[0].nodes, 40);
  EXPECT_EQ(read.compiled[0].deferred, 7);
  EXPECT_EQ(read.compiled[1].deferred, 0);
  EXPECT_EQ(read.compiled[0].seconds, 0.5);
  EXPECT_EQ(read.compiled[0].reason, "args[0] has sizes [1]");
  EXPECT_TRUE(run.metrics.steps.at(1).outcome.compiled.empty());
  EXPECT_TRUE(has_text(summary_text(run), "5 captured, 1 of them again, 2 loaded"));
  const std::string page = report_page({run});
  EXPECT_TRUE(has_text(page, "<h2>Graphs</h2>"));
  EXPECT_TRUE(has_text(page, "<td>args[0] has sizes [1]</td>"));
}

TEST(Metrics, NonFiniteNumbersAreReadAsNaN) {
  const ScratchFolder folder;
  MetricsFile file;
  file.on_start(made_description(folder.path()));
  StepOutcome outcome = made_step(1);
  outcome.loss = std::numeric_limits<double>::quiet_NaN();
  file.on_step(outcome, {});
  EXPECT_TRUE(std::isnan(read_metrics(folder / "metrics.jsonl").steps.at(0).outcome.loss));
}

TEST(Metrics, EveryLineIsThereAtOnce) {
  const ScratchFolder folder;
  MetricsFile file;
  file.on_start(made_description(folder.path()));
  for (std::int64_t step = 1; step <= 3; ++step) {
    file.on_step(made_step(step), made_extras(step));
    EXPECT_EQ(read_metrics(folder / "metrics.jsonl").steps.size(), static_cast<std::size_t>(step));
  }
}

TEST(Metrics, AResumedRunReplacesWhatItRepeats) {
  const ScratchFolder folder;
  const auto path = unfinished_run(folder);
  EXPECT_FALSE(read_metrics(path).end.has_value());
  {
    MetricsFile file;
    RunDescription run = made_description(folder.path());
    run.first_step = 100;
    run.resumed_from = "checkpoints/step-00000100";
    file.on_start(run);
    RunMetrics between = read_metrics(path);
    EXPECT_EQ(between.steps.size(), 100u);  // those valid so far
    EXPECT_EQ(between.checkpoints.size(), 1u);
    StepOutcome again = made_step(101);
    again.loss = 7;
    file.on_step(again, made_extras(101));
    tell_steps(file, 101, 200);
    file.on_end(RunEnd::Finished, 200);
  }
  const RunMetrics metrics = read_metrics(path);
  EXPECT_EQ(metrics.starts.size(), 2u);
  EXPECT_EQ(metrics.starts[1].resumed_from, "checkpoints/step-00000100");
  ASSERT_EQ(metrics.steps.size(), 200u);
  EXPECT_EQ(metrics.repeated_steps, 20);
  EXPECT_EQ(metrics.steps[100].outcome.loss, 7);
  for (std::size_t i = 0; i < 200; ++i)
    EXPECT_EQ(metrics.steps[i].outcome.step, static_cast<std::int64_t>(i + 1));
  EXPECT_EQ(metrics.validations.size(), 4u);
  EXPECT_TRUE(metrics.end.has_value());
}

TEST(Metrics, AnIncompleteLastLineIsIgnored) {
  const ScratchFolder folder;
  const std::string text = text_of(unfinished_run(folder));
  const std::size_t last = text.rfind('\n', text.size() - 2) + 1;
  for (std::size_t length = last + 1; length < text.size() - 1; length += 7) {
    const RunMetrics metrics = read_metrics(folder.write("cut.jsonl", text.substr(0, length)));
    EXPECT_TRUE(metrics.truncated) << length;
    EXPECT_EQ(metrics.steps.size(), 119u);
  }
  // Complete except for its newline.
  const RunMetrics metrics = read_metrics(folder.write("cut.jsonl", text.substr(0, text.size() - 1)));
  EXPECT_FALSE(metrics.truncated);
  EXPECT_EQ(metrics.steps.size(), 120u);
}

TEST(Metrics, TheWriterContinuesAfterAnIncompleteLine) {
  const ScratchFolder folder;
  const std::string text = text_of(unfinished_run(folder));
  folder.write("metrics.jsonl", text.substr(0, text.size() - 10));
  MetricsFile file;
  RunDescription run = made_description(folder.path());
  run.first_step = 100;
  run.resumed_from = "checkpoints/step-00000100";
  file.on_start(run);
  file.on_step(made_step(101), made_extras(101));
  const RunMetrics metrics = read_metrics(folder / "metrics.jsonl");
  EXPECT_EQ(metrics.steps.size(), 101u);
  EXPECT_FALSE(metrics.truncated);
}

TEST(Metrics, OtherDamageIsNamedByItsLine) {
  const ScratchFolder folder;
  const std::string start = start_line(made_description(folder.path()), 1);
  const std::string step = step_line(made_step(1), made_extras(1), 2);
  const auto error_of = [&](const std::string& text) {
    return message_of<ConfigError>([&] { read_metrics(folder.write("bad.jsonl", text)); });
  };
  EXPECT_TRUE(
      has_text(error_of(start + step.substr(0, 50) + "\n" + step), "bad.jsonl:2: got {\"type\":\"step\""));
  EXPECT_TRUE(has_text(error_of(start + step + "[1]\n"), "bad.jsonl:3: got [1], expected one JSON object"));
  EXPECT_TRUE(
      has_text(error_of(start + "{\"type\":\"step\",\"step\":1}\n"), "bad.jsonl:2: got no key \"time\""));
  EXPECT_TRUE(has_text(error_of(start + "\n"), "bad.jsonl:2"));
  EXPECT_TRUE(has_text(error_of(start + "{\"type\":\"end\",\"step\":1,\"time\":1,\"end\":\"lost\"}\n"),
                       "expected finished, stopped, time limit or not saved"));
  EXPECT_TRUE(has_text(error_of(start + "{\"type\":\"trace\",\"step\":-1,\"time\":1,\"path\":\"a\"}\n"),
                       "\"step\": -1, expected a whole number of at least 0"));
  EXPECT_TRUE(has_text(
      error_of(start + "{\"type\":\"trace\",\"step\":18446744073709551615,\"time\":1,\"path\":\"a\"}\n"),
      "expected a whole number"));
  EXPECT_TRUE(has_text(error_of(start + "{\"type\":\"validation\",\"step\":1,\"time\":\"now\"}\n"),
                       "\"time\": \"now\", expected a number"));
  EXPECT_TRUE(has_text(error_of(step), "no start record"));
  EXPECT_TRUE(has_text(error_of(""), "no records"));
  EXPECT_TRUE(has_text(error_of(start + std::string(100, '\0') + "\n"), "bad.jsonl:2"));
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { read_metrics(folder / "absent.jsonl"); }),
                       "absent.jsonl, expected a file that can be read"));
  // A type of a later version is not damage.
  EXPECT_EQ(read_metrics(folder.write("new.jsonl", start + "{\"type\":\"weather\"}\n" + step)).steps.size(),
            1u);
}

TEST(Metrics, AFolderThatCannotBeWrittenIsAnErrorAtTheStart) {
  const ScratchFolder folder;
  const auto blocked = folder.write("file", "no folder");
  MetricsFile file;
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { file.on_start(made_description(blocked)); }),
                       "set output.run_folder"));
}

TEST(Metrics, AFullDiskLosesLinesButNeverPartsOfThem) {
  const ScratchFolder folder;
  MetricsFile file;
  file.on_start(made_description(folder.path()));
  tell_steps(file, 0, 10);
  const auto size = std::filesystem::file_size(folder / "metrics.jsonl");
  // A file size limit simulates a full disk.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{size + 100, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  tell_steps(file, 10, 20);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(std::filesystem::file_size(folder / "metrics.jsonl"), size);
  tell_steps(file, 20, 30);
  const RunMetrics metrics = read_metrics(folder / "metrics.jsonl");
  EXPECT_EQ(metrics.steps.size(), 20u);
  EXPECT_EQ(metrics.steps[10].outcome.step, 21);
  EXPECT_EQ(metrics.missing_lines, 10) << "recorded in their place";
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
RC_GTEST_PROP(MetricsProperty, AnyBytesEndInAnErrorOrInMetrics, ()) {
  static const ScratchFolder folder;
  std::string text =
      start_line(made_description("/run"), 1) + step_line(made_step(1), made_extras(1), 2) + end_line({});
  const int changes = *rc::gen::inRange(1, 6);
  for (int i = 0; i < changes; ++i)
    text[*rc::gen::inRange<std::size_t>(0, text.size())] = *rc::gen::arbitrary<char>();
  try {
    const RunMetrics metrics = read_metrics(folder.write("any.jsonl", text));
    RC_ASSERT(!metrics.starts.empty());
  } catch (const ConfigError& error) {
    RC_ASSERT(std::string(error.what()).find("any.jsonl") != std::string::npos);
  }
}
#endif

}  // namespace metrics_test
}  // namespace penstock::test
