// Displays the progress of a run in the terminal or in a log.
//
//   Progress progress(progress_options(config.output));
//   Trainer trainer(world, config, folder, {&progress});
//
//   [############----------------]  86/200  loss 2.4513  15.2 ktok/s  MFU 41 %  312.0 MiB  0:31 left
//   step 50: validation loss 2.7012 (0.8 s)
//
// On a terminal, one line is overwritten, and events are printed on separate lines above it. Elsewhere, a
// plain line is printed every few seconds, and always for the first step, the last step and steps that are
// validated.
//
// Ranks run under a launcher whose pipes are not terminals. The process that starts the ranks sets
// PENSTOCK_PROGRESS_TTY to the columns of its terminal (0: none), and the bar is written to the controlling
// terminal, bypassing the pipes. If the variable is not set, standard error is checked. If the terminal
// cannot be opened, lines are printed.
//
// MFU, the fraction of peak FLOP/s used by the model, is shown only if RunDescription::peak_flops is known.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "penstock/observer.h"
#include "penstock/train_config.h"

namespace penstock::train {

enum class ProgressKind { Bar, Lines, None };

struct ProgressOptions {
  ProgressKind kind = ProgressKind::Lines;
  int columns = 80;  // width of a bar
  std::function<void(const std::string&)>
      write;  // empty: standard error, or the controlling terminal for a rank's bar
  std::chrono::milliseconds bar_pause{100};  // minimum time between two updates of the bar
  std::chrono::milliseconds line_pause{5000};
  std::function<std::chrono::steady_clock::time_point()> clock;  // empty: the steady clock
};
// Options from output.progress and the environment.
ProgressOptions progress_options(const OutputConfig& config);
// The same for a given environment: the value of PENSTOCK_PROGRESS_TTY (nullptr: not set) and the columns of
// standard error (0: not a terminal). Throws ConfigError if the value is not a number.
struct ProgressChoice {
  ProgressKind kind = ProgressKind::Lines;
  int columns = 0;
  bool bypasses_launcher = false;  // the bar is written to the controlling terminal
};
ProgressChoice choose_progress(const std::string& configured, const char* variable, int own_columns);

// The contents of one line.
struct ProgressState {
  std::int64_t step = 0;
  std::int64_t steps = 0;
  double loss = 0;
  bool skipped = false;  // fp16: the update was skipped
  double tokens_per_second = 0;
  double mfu = 0;                   // 0 to 1; 0: unknown
  std::int64_t resident_bytes = 0;  // 0: unknown
  std::int64_t device_bytes = 0;    // 0: no device
  double seconds_left = 0;
  std::vector<LossTerm> auxiliary = {};
};
// At most `columns` - 1 wide: first the bar becomes narrower, then words at the end are omitted.
std::string bar_line(const ProgressState& state, int columns);
std::string plain_line(const ProgressState& state);

// "0:31", "12:05", "3:02:11", "2 d 3 h".
std::string format_duration(double seconds);
// "950 tok/s", "15.2 ktok/s", "1.25 Mtok/s".
std::string format_token_rate(double tokens_per_second);

class Progress final : public Observer {
 public:
  explicit Progress(ProgressOptions options);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() override;  // ends the bar's line

  void on_start(const RunDescription& run) override;
  void on_step(const StepOutcome& outcome, const StepExtras& extras) override;
  void on_validation(std::int64_t step, double loss, double seconds) override;
  void on_checkpoint(std::int64_t step, const checkpoint::SaveStall& stall) override;
  void on_trace(std::int64_t step, const std::filesystem::path& path) override;
  void on_end(RunEnd end, std::int64_t step) override;

 private:
  using Time = std::chrono::steady_clock::time_point;

  void event(const std::string& text);
  void show(bool at_once);

  ProgressOptions options_;
  RunDescription run_;
  ProgressState state_;
  std::optional<double> validation_;
  Time begin_;
  Time next_;
  std::int64_t tokens_ = 0;
  double seconds_ = 0;       // of steps
  std::int64_t shown_ = -1;  // step of the last line
  bool bar_drawn_ = false;
};

}  // namespace penstock::train
