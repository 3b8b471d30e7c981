// Writes metrics.jsonl into the run folder during a run. See docs/metrics.md for the format, metrics.h for
// the reader.
//
//   MetricsFile metrics;
//   Trainer trainer(world, config, folder, {&progress, &metrics});
//
// Each line is written immediately by one call, so that readers of the file, or of the file of a killed run,
// find complete lines and at most one incomplete line at the end. A resumed run continues after the last
// complete line. A full disk does not end the training: lines are dropped, never partially written. The log
// reports the first failure and, at the end, the number of dropped lines; the next line written is preceded
// by a line of type "missing" with their number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "penstock/observer.h"

namespace penstock::train {

class MetricsFile final : public Observer {
 public:
  // `clock` returns unix seconds.
  explicit MetricsFile(std::function<double()> clock = {});
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;
  ~MetricsFile() override;

  // Throws ConfigError if the file cannot be opened.
  void on_start(const RunDescription& run) override;
  void on_step(const StepOutcome& outcome, const StepExtras& extras) override;
  void on_validation(std::int64_t step, double loss, double seconds) override;
  void on_checkpoint(std::int64_t step, const checkpoint::SaveStall& stall) override;
  void on_checkpoint_failed(std::int64_t step, const std::string& error) override;
  void on_trace(std::int64_t step, const std::filesystem::path& path) override;
  void on_end(RunEnd end, std::int64_t step) override;

  static constexpr const char* kName = "metrics.jsonl";

 private:
  void open(const std::filesystem::path& folder);
  void append(const std::string& line);
  bool write(const std::string& line);  // false: nothing was written, errno has the reason

  std::function<double()> clock_;
  std::filesystem::path folder_;
  int file_ = -1;
  std::int64_t size_ = 0;     // of complete lines
  std::int64_t missing_ = 0;  // lines since the last one that could be written
  std::int64_t all_missing_ = 0;
};

}  // namespace penstock::train
