// Writes metrics.jsonl into the run folder while a run goes on. docs/metrics.md has the format, metrics.h the reader.
//
//   MetricsFile metrics;
//   Trainer trainer(world, config, folder, {&progress, &metrics});
//
// Every line is handed to the system at once and whole: whoever reads the file, or kills the run, finds complete lines and at most one cut
// at the end. A resumed run goes on in the file, after the last whole line. A disk that is full does not end the training: lines are lost,
// which the log says once, never half written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "penstock/train/observer.h"

namespace penstock::train {

class MetricsFile final : public Observer {
 public:
  // `clock` gives unix seconds.
  explicit MetricsFile(std::function<double()> clock = {});
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;
  ~MetricsFile() override;

  // Throws ConfigError when the file cannot be opened.
  void on_start(const RunDescription& run) override;
  void on_step(const StepOutcome& outcome, const StepExtras& extras) override;
  void on_validation(std::int64_t step, double loss, double seconds) override;
  void on_checkpoint(std::int64_t step, const checkpoint::SaveStall& stall) override;
  void on_trace(std::int64_t step, const std::filesystem::path& path) override;
  void on_end(RunEnd end, std::int64_t step) override;

  static constexpr const char* kName = "metrics.jsonl";

 private:
  void open(const std::filesystem::path& folder);
  void append(const std::string& line);

  std::function<double()> clock_;
  std::filesystem::path folder_;
  int file_ = -1;
  std::int64_t size_ = 0;  // of whole lines
  bool warned_ = false;
};

}  // namespace penstock::train
