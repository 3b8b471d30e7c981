// A run folder read for a report: metrics, traced steps, and notes about what is missing.
//
//   const RunReport run = load_run("runs/first");
//   std::cout << summary_text(run);
//   write(report_page({run}));                    // report_page.h
//
// `notes` has a sentence for everything that is missing. Independent of Torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "penstock/pipeline/report/step_trace.h"
#include "penstock/pipeline/report/trace_comparison.h"
#include "penstock/train/report/metrics.h"

namespace penstock::train {

// Time breakdown of a traced step on one rank, in milliseconds. The parts add up to the step.
struct RankTimes {
  double compute = 0;
  double communication = 0;  // starting transfers, passing tensors on, gathering and reducing
  double wait = 0;           // for receives and for sends to complete
  double rest = 0;           // before the first, between and after the last instruction
  double simulated_compute = 0;
};

struct TraceReport {
  std::int64_t step = 0;
  std::string path;  // as in the metrics
  StepTrace trace;
  TraceComparison comparison;
  std::vector<RankTimes> ranks;
  double bubble = 0;  // fraction of ranks x time without computation
  double simulated_bubble = 0;
};
// Throws the same exceptions as compare_with_simulation.
TraceReport report_trace(StepTrace trace);

// Speed and times are means over all steps but the first five, which are warm-up.
struct RunNumbers {
  double loss = 0;  // mean over the last steps
  std::int64_t loss_steps = 0;
  std::vector<LossTerm> auxiliary;  // means over the same steps; the weight is that of the last one
  std::optional<ValidationMetrics> last_validation;
  std::optional<ValidationMetrics> best_validation;
  double tokens_per_second = 0;
  double mfu = 0;  // 0: the peak is unknown
  StepTimes times;
  double outside_schedule = 0;  // fraction of a step outside the schedule
  std::int64_t peak_resident_bytes = 0;
  std::int64_t peak_device_bytes = 0;
  double longest_stall = 0;  // of a checkpoint, seconds
  double seconds = 0;        // from the first start to the last line, pauses included
  std::int64_t tokens = 0;
};

struct RunReport {
  std::filesystem::path folder;
  std::string name;
  RunMetrics metrics;
  std::vector<TraceReport> traces;
  std::vector<std::string> notes;
  RunNumbers numbers;

  const StartMetrics& start() const { return metrics.starts.back(); }
  std::int64_t last_step() const;
  // "finished, 200 of 200 steps", "unfinished (killed, failed or still running), 120 of 200 steps".
  std::string state() const;
  // The trace that is drawn: the last one.
  const TraceReport* trace() const { return traces.empty() ? nullptr : &traces.back(); }
};

// Loads a run from its folder or its metrics.jsonl. A trace that cannot be read becomes a note. Throws
// ConfigError for unreadable metrics.
RunReport load_run(const std::filesystem::path& path);

// A few lines for a terminal.
std::string summary_text(const RunReport& run);

// Means over `span` neighbours, half on either side and fewer at the ends; non-finite values are ignored.
std::vector<double> smoothed(const std::vector<double>& values, std::size_t span);
double median_of(std::vector<double> values);  // of the finite values; 0 if there are none

}  // namespace penstock::train
