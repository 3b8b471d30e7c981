// Writes metrics.jsonl into the run folder while a run goes on. docs/metrics.md has the format, metrics.h the reader.
//
//   MetricsFile metrics;
//   Trainer trainer(world, config, folder, {&progress, &metrics});
//
// Every line is handed to the system at once and whole: whoever reads the file, or kills the run, finds complete lines and at most one cut
// at the end. A resumed run goes on in the file, after the last whole line. A disk that is full does not end the training: lines are lost,
// never half written; the log says so when it begins and how many they were at the end, and the next line that can be written is one of type
// "missing" with their number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "penstock/train/report/observer.h"

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
  void on_checkpoint_failed(std::int64_t step, const std::string& error) override;
  void on_trace(std::int64_t step, const std::filesystem::path& path) override;
  void on_end(RunEnd end, std::int64_t step) override;

  static constexpr const char* kName = "metrics.jsonl";

 private:
  void open(const std::filesystem::path& folder);
  void append(const std::string& line);
  bool write(const std::string& line);  // false: nothing of it is in the file, errno says why

  std::function<double()> clock_;
  std::filesystem::path folder_;
  int file_ = -1;
  std::int64_t size_ = 0;  // of whole lines
  std::int64_t missing_ = 0;      // lines since the last one that could be written
  std::int64_t all_missing_ = 0;
};

}  // namespace penstock::train
