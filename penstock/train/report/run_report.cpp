#include "penstock/train/report/run_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <system_error>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/files.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/train/report/metrics_file.h"
#include "penstock/train/report/progress.h"

namespace penstock::train {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kWarmUpSteps = 5;
constexpr std::size_t kLastSteps = 20;

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

// Sums over all steps but the first few; steps with an unknown time are ignored.
void add_times(RunNumbers& numbers, const std::vector<StepMetrics>& steps) {
  StepTimes sum;
  double count = 0, tokens = 0;
  for (std::size_t i = steps.size() > 2 * kWarmUpSteps ? kWarmUpSteps : 0; i < steps.size(); ++i) {
    const StepTimes& times = steps[i].outcome.times;
    if (!std::isfinite(times.data + times.schedule + times.sync + times.update + times.total)) continue;
    for (double StepTimes::*part :
         {&StepTimes::data, &StepTimes::schedule, &StepTimes::sync, &StepTimes::update, &StepTimes::total})
      sum.*part += times.*part;
    tokens += static_cast<double>(steps[i].outcome.tokens);
    ++count;
  }
  if (!(sum.total > 0)) return;
  numbers.tokens_per_second = tokens / sum.total;
  numbers.outside_schedule = 1 - sum.schedule / sum.total;
  for (double StepTimes::*part :
       {&StepTimes::data, &StepTimes::schedule, &StepTimes::sync, &StepTimes::update, &StepTimes::total})
    numbers.times.*part = sum.*part / count;
}

// By name, over the steps from `first` on that have a finite value.
std::vector<LossTerm> mean_terms(const std::vector<StepMetrics>& steps, std::size_t first) {
  std::vector<LossTerm> means;
  std::vector<double> counts;
  for (std::size_t i = first; i < steps.size(); ++i)
    for (const LossTerm& term : steps[i].outcome.auxiliary) {
      if (!std::isfinite(term.value)) continue;
      std::size_t at = 0;
      while (at < means.size() && means[at].name != term.name) ++at;
      if (at == means.size()) {
        means.push_back({.name = term.name});
        counts.push_back(0);
      }
      means[at].value += term.value;
      means[at].weight = term.weight;
      ++counts[at];
    }
  for (std::size_t i = 0; i < means.size(); ++i) means[i].value /= counts[i];
  return means;
}

RunNumbers numbers_of(const RunMetrics& metrics) {
  RunNumbers numbers;
  const std::vector<StepMetrics>& steps = metrics.steps;
  for (std::size_t i = steps.size() > kLastSteps ? steps.size() - kLastSteps : 0; i < steps.size(); ++i) {
    if (!std::isfinite(steps[i].outcome.loss)) continue;
    numbers.loss += steps[i].outcome.loss;
    ++numbers.loss_steps;
  }
  if (numbers.loss_steps > 0) numbers.loss /= static_cast<double>(numbers.loss_steps);
  numbers.auxiliary = mean_terms(steps, steps.size() > kLastSteps ? steps.size() - kLastSteps : 0);
  for (const ValidationMetrics& validation : metrics.validations) {
    numbers.last_validation = validation;
    if (std::isfinite(validation.loss) &&
        (!numbers.best_validation || validation.loss < numbers.best_validation->loss))
      numbers.best_validation = validation;
  }
  add_times(numbers, steps);
  const StartMetrics& start = metrics.starts.back();
  if (start.peak_flops > 0)
    numbers.mfu = numbers.tokens_per_second * start.flops_per_token / start.peak_flops;
  for (const StepMetrics& step : steps) {
    numbers.peak_resident_bytes = std::max(numbers.peak_resident_bytes, step.resident_bytes);
    numbers.peak_device_bytes = std::max(numbers.peak_device_bytes, step.device_bytes);
    numbers.tokens += step.outcome.tokens;
  }
  for (const CheckpointMetrics& checkpoint : metrics.checkpoints)
    numbers.longest_stall = std::max(numbers.longest_stall, checkpoint.stall.total());
  double last = start.time;
  if (!steps.empty()) last = std::max(last, steps.back().time);
  if (metrics.end) last = std::max(last, metrics.end->time);
  numbers.seconds = last - metrics.starts.front().time;
  return numbers;
}

void add_notes(RunReport& run) {
  const RunMetrics& metrics = run.metrics;
  const auto note = [&](std::string text) { run.notes.push_back(std::move(text)); };
  if (!metrics.end) note("The run is unfinished: it was killed, it failed, or it is still running.");
  if (metrics.truncated) note("The last line of the metrics is incomplete and was ignored.");
  if (metrics.starts.size() > 1)
    note(fmt::format("The run was started {}, most recently after step {}; {} again.",
                     count_of(metrics.starts.size(), "time"), run.start().first_step,
                     count_of(metrics.repeated_steps, "step was done", "steps were done")));
  if (metrics.steps.empty()) note("No steps were recorded: there are no curves.");
  if (metrics.validations.empty())
    note("There was no validation (training.validate_every, data.validation_fraction).");
  if (metrics.checkpoints.empty()) note("No checkpoint was written.");
  if (!metrics.failed_checkpoints.empty())
    note(fmt::format("{} checkpoint{} could not be written, most recently at step {}: {}",
                     metrics.failed_checkpoints.size(), metrics.failed_checkpoints.size() == 1 ? "" : "s",
                     metrics.failed_checkpoints.back().step, metrics.failed_checkpoints.back().error));
  if (metrics.missing_lines > 0)
    note(fmt::format("{} lines of the metrics could not be written and are missing.", metrics.missing_lines));
  if (metrics.traces.empty())
    note("No step was traced (output.trace_steps): there is no timeline, and no measured bubble.");
  std::int64_t skipped = 0, bad = 0;
  for (const StepMetrics& step : metrics.steps) {
    skipped += step.outcome.skipped;
    bad += !std::isfinite(step.outcome.loss);
  }
  if (skipped > 0)
    note(fmt::format("{} skipped because {} overflowed.", count_of(skipped, "step was", "steps were"),
                     skipped == 1 ? "its gradients" : "their gradients"));
  if (bad > 0) note(fmt::format("{} a loss that is not finite.", count_of(bad, "step has", "steps have")));
  if (!metrics.steps.empty() && run.start().peak_flops <= 0)
    note("The peak performance of this machine was not measured: the MFU is unknown.");
}

void load_traces(RunReport& run) {
  for (const TraceMetrics& trace : run.metrics.traces) {
    try {
      TraceReport report = report_trace(read_trace((run.folder / trace.path).string()));
      report.step = trace.step;
      report.path = trace.path;
      run.traces.push_back(std::move(report));
    } catch (const std::exception& error) {
      run.notes.push_back(fmt::format("The trace of step {} cannot be shown: {}", trace.step,
                                      printable(without_backtrace(error.what()))));
    }
  }
}

}  // namespace

double median_of(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::vector<double> smoothed(const std::vector<double>& values, std::size_t span) {
  std::vector<double> sums{0};
  std::vector<std::size_t> counts{0};
  for (const double value : values) {
    sums.push_back(sums.back() + (std::isfinite(value) ? value : 0));
    counts.push_back(counts.back() + (std::isfinite(value) ? 1 : 0));
  }
  std::vector<double> out;
  out.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    // Averages the same distance on either side, so that a falling curve is not shifted; the ends use fewer
    // values.
    const std::size_t room = std::min(i, values.size() - 1 - i);
    const std::size_t reach = std::min(span / 2, std::max(room, span / 6));
    const std::size_t begin = i - std::min(i, reach), end = std::min(values.size(), i + reach + 1);
    out.push_back(counts[end] > counts[begin]
                      ? (sums[end] - sums[begin]) / static_cast<double>(counts[end] - counts[begin])
                      : values[i]);
  }
  return out;
}

TraceReport report_trace(StepTrace source) {
  using Kind = TraceEvent::Kind;
  TraceReport report{.trace = std::move(source)};
  const StepTrace& trace = report.trace;
  report.comparison = compare_with_simulation(trace);
  const double duration = milliseconds(trace.duration_ns());
  double busy = 0, simulated = 0;
  for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
    RankTimes times;
    for (const TraceEvent& event : trace.ranks[rank]) {
      const double length = milliseconds(event.end_ns - event.begin_ns);
      if (event.kind == Kind::Compute)
        times.compute += length;
      else if (event.kind == Kind::Await || event.kind == Kind::Finish)
        times.wait += length;
      else
        times.communication += length;
    }
    times.rest = std::max(0.0, duration - times.compute - times.wait - times.communication);
    times.simulated_compute = report.comparison.ranks.at(rank).simulated_busy_ms;
    busy += times.compute;
    simulated += times.simulated_compute;
    report.ranks.push_back(times);
  }
  const auto ranks = static_cast<double>(trace.ranks.size());
  if (duration > 0) report.bubble = 1 - busy / (ranks * duration);
  if (report.comparison.simulated_ms > 0)
    report.simulated_bubble = 1 - simulated / (ranks * report.comparison.simulated_ms);
  return report;
}

std::int64_t RunReport::last_step() const {
  std::int64_t step = start().first_step;
  if (!metrics.steps.empty()) step = std::max(step, metrics.steps.back().outcome.step);
  if (metrics.end) step = std::max(step, metrics.end->step);
  return step;
}

std::string RunReport::state() const {
  const std::string how =
      metrics.end ? std::string(to_text(metrics.end->end)) : "unfinished (killed, failed or still running)";
  return fmt::format("{}, {} of {} steps", how, last_step(), start().steps);
}

RunReport load_run(const fs::path& path) {
  RunReport run;
  std::error_code unknown;  // errors are reported below
  const bool is_file = fs::is_regular_file(path, unknown);
  run.folder = is_file ? path.parent_path() : path;
  if (run.folder.empty()) run.folder = ".";
  const fs::path whole = fs::absolute(run.folder, unknown).lexically_normal();
  run.name = (whole.has_filename() ? whole.filename() : whole.parent_path().filename()).string();
  const fs::path metrics = is_file ? path : path / MetricsFile::kName;
  if (!file_exists(metrics))
    throw ConfigError(describe("run", path.string(), fmt::format("a folder with {}", MetricsFile::kName),
                               "give the folder of a penstock train run"));
  run.metrics = read_metrics(metrics);
  run.numbers = numbers_of(run.metrics);
  add_notes(run);
  load_traces(run);
  return run;
}

std::string summary_text(const RunReport& run) {
  const RunNumbers& numbers = run.numbers;
  std::string text =
      fmt::format("{}: {}, {}\n", run.folder.string(), run.state(), format_duration(numbers.seconds));
  const auto line = [&](std::string_view name, const std::string& words) {
    text += fmt::format("  {:<12}{}\n", name, words);
  };
  if (numbers.loss_steps > 0)
    line("loss", fmt::format("{:.4f}, mean of the last {} steps", numbers.loss, numbers.loss_steps));
  std::vector<std::string> terms;
  for (const LossTerm& term : numbers.auxiliary)
    terms.push_back(fmt::format("{} {:.4g} (weight {:g})", term.name, term.value, term.weight));
  std::int64_t captured = 0, again = 0, loaded = 0;
  for (const StepMetrics& step : run.metrics.steps) {
    captured += step.outcome.first_captures + step.outcome.recaptures;
    again += step.outcome.recaptures;
    loaded += step.outcome.loads;
  }
  if (captured + loaded > 0)
    line("graphs", fmt::format("{} captured, {} of them again{}", captured, again,
                               loaded > 0 ? fmt::format(", {} loaded", loaded) : std::string()));
  if (!terms.empty()) line("auxiliary", fmt::format("{}", fmt::join(terms, ", ")));
  if (numbers.best_validation)
    line("validation", fmt::format("{:.4f} at step {}, best {:.4f} at step {}", numbers.last_validation->loss,
                                   numbers.last_validation->step, numbers.best_validation->loss,
                                   numbers.best_validation->step));
  if (numbers.times.total > 0) {
    line("speed", fmt::format("{}, {:.1f} ms per step{}", format_token_rate(numbers.tokens_per_second),
                              1e3 * numbers.times.total,
                              numbers.mfu > 0 ? fmt::format(", MFU {:.1f} %", 100 * numbers.mfu) : ""));
    const auto share = [&](double part) { return 100 * part / numbers.times.total; };
    line("step", fmt::format("data {:.1f} %, schedule {:.1f} %, sync {:.1f} %, update {:.1f} %",
                             share(numbers.times.data), share(numbers.times.schedule),
                             share(numbers.times.sync), share(numbers.times.update)));
  }
  if (const TraceReport* trace = run.trace())
    line("pipeline",
         fmt::format("step {}: bubble {:.1f} %, simulated {:.1f} %; {:.1f} ms, simulated {:.1f} ms",
                     trace->step, 100 * trace->bubble, 100 * trace->simulated_bubble,
                     trace->comparison.measured_ms, trace->comparison.simulated_ms));
  if (numbers.peak_resident_bytes > 0)
    line("memory", format_bytes(static_cast<std::uint64_t>(numbers.peak_resident_bytes)) +
                       " on the first rank" +
                       (numbers.peak_device_bytes > 0
                            ? ", " + format_bytes(static_cast<std::uint64_t>(numbers.peak_device_bytes)) +
                                  " on its device"
                            : ""));
  if (!run.metrics.checkpoints.empty())
    line("checkpoints", fmt::format("{}, training paused for at most {:.0f} ms",
                                    run.metrics.checkpoints.size(), 1e3 * numbers.longest_stall));
  for (const std::string& note : run.notes) line("note", note);
  return text;
}

}  // namespace penstock::train
