// The contents of a run's metrics.jsonl: one JSON object per line, in chronological order (docs/metrics.md).
//
//   const RunMetrics metrics = read_metrics("runs/first/metrics.jsonl");
//   metrics.steps.back().loss
//   if (!metrics.end) ...                       // killed, failed, or still running
//
// A resumed run continues in the same file. Its start line contains the step after which it continued;
// earlier lines about later steps are superseded by the lines that follow. MetricsFile (metrics_file.h)
// writes the file. Plain values, independent of Torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/checkpoint_types.h"
#include "penstock/observer.h"

namespace penstock::train {

// Times are unix seconds.
struct StartMetrics {
  double time = 0;
  std::vector<std::pair<std::string, std::string>>
      config;              // "layout.pp" -> "2": all fields, values in TOML syntax
  std::int64_t steps = 0;  // total steps of the run
  int ranks = 1;
  std::string device;
  std::string libtorch;
  std::int64_t parameters = 0;
  double flops_per_token = 0;
  double peak_flops = 0;  // 0: unknown
  std::vector<std::string> partition;
  std::int64_t tokens_per_step = 0;
  std::uint64_t training_tokens = 0;
  std::uint64_t validation_tokens = 0;
  std::int64_t first_step = 0;
  std::string resumed_from;

  // Returns the value of a field, or an empty string if there is no such field.
  std::string value(std::string_view name) const;
};

struct StepMetrics {
  double time = 0;
  StepOutcome outcome;
  double tokens_per_second = 0;
  std::int64_t resident_bytes = 0;
  std::int64_t device_bytes = 0;
};

struct ValidationMetrics {
  double time = 0;
  std::int64_t step = 0;
  double loss = 0;
  double seconds = 0;
};

struct CheckpointMetrics {
  double time = 0;
  std::int64_t step = 0;
  checkpoint::SaveStall stall;
};

struct FailedCheckpointMetrics {
  double time = 0;
  std::int64_t step = 0;
  std::string error;
};

struct TraceMetrics {
  double time = 0;
  std::int64_t step = 0;
  std::string path;  // relative to the run folder
};

struct EndMetrics {
  double time = 0;
  std::int64_t step = 0;
  RunEnd end = RunEnd::Finished;
};
// "finished", "stopped", "time limit", "not saved".
std::string_view to_text(RunEnd end);

struct RunMetrics {
  std::vector<StartMetrics> starts;  // more than one: the run was resumed
  std::vector<StepMetrics> steps;    // ascending; each step once
  std::vector<ValidationMetrics> validations;
  std::vector<CheckpointMetrics> checkpoints;
  std::vector<FailedCheckpointMetrics> failed_checkpoints;
  std::vector<TraceMetrics> traces;
  std::optional<EndMetrics> end;    // of the last start
  std::int64_t repeated_steps = 0;  // lines superseded by a resumed run
  std::int64_t missing_lines = 0;   // lines that could not be written
  bool truncated = false;           // the last line is incomplete because the run was killed
};

// One line each, including the newline. Non-finite numbers become null.
std::string start_line(const RunDescription& run, double time);
std::string step_line(const StepOutcome& outcome, const StepExtras& extras, double time);
std::string validation_line(const ValidationMetrics& validation);
std::string checkpoint_line(const CheckpointMetrics& checkpoint);
std::string failed_checkpoint_line(const FailedCheckpointMetrics& failed);
std::string missing_line(std::int64_t lines, double time);
std::string trace_line(const TraceMetrics& trace);
std::string end_line(const EndMetrics& end);

// Skips an incomplete last line and sets `truncated`; ignores lines of unknown type. Throws ConfigError with
// the line number for anything else, and for files larger than the limits below.
RunMetrics read_metrics(const std::filesystem::path& path);

inline constexpr std::uint64_t kMaxMetricsBytes = std::uint64_t{4} << 30;
inline constexpr std::size_t kMaxLineBytes = std::size_t{16} << 20;

}  // namespace penstock::train
