// Shows a run to the person who started it.
//
//   Progress progress(progress_options(config.output));
//   Trainer trainer(world, config, folder, {&progress});
//
//   [############----------------]  86/200  loss 2.4513  15.2 ktok/s  MFU 41 %  312.0 MiB  0:31 left
//   step 50: validation loss 2.7012 (0.8 s)
//
// On a terminal one line is written over, and events get lines of their own above it. Elsewhere there is a plain line every few seconds,
// and always for the first and the last step and the ones that are validated.
//
// Ranks run under a launcher whose pipes are no terminals. Where the launcher itself has one, the process that starts the ranks sets
// PENSTOCK_PROGRESS_TTY to its number of columns (0: it has none), and the bar goes to the controlling terminal, past the pipes. Without the
// variable standard error decides. A terminal that cannot be opened means lines.
//
// MFU, the share of the peak that useful arithmetic reaches, is shown where RunDescription::peak_flops is known, and left out elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "penstock/train_config.h"
#include "penstock/train/report/observer.h"

namespace penstock::train {

enum class ProgressKind { Bar, Lines, None };

struct ProgressOptions {
  ProgressKind kind = ProgressKind::Lines;
  int columns = 80;                                         // of a bar
  std::function<void(const std::string&)> write;            // empty: standard error, or the terminal for a bar of a rank
  std::chrono::milliseconds bar_pause{100};                 // least time between two looks of the bar
  std::chrono::milliseconds line_pause{5000};
  std::function<std::chrono::steady_clock::time_point()> clock;  // empty: the steady clock
};
// From output.progress and the environment.
ProgressOptions progress_options(const OutputConfig& config);
// The same for given surroundings: the value of PENSTOCK_PROGRESS_TTY (nullptr: not set), and the columns of standard error (0: no
// terminal). Throws ConfigError for a value that is no number.
struct ProgressChoice {
  ProgressKind kind = ProgressKind::Lines;
  int columns = 0;
  bool past_the_launcher = false;  // the bar is written to the controlling terminal
};
ProgressChoice choose_progress(const std::string& configured, const char* variable, int own_columns);

// What one line shows.
struct ProgressState {
  std::int64_t step = 0;
  std::int64_t steps = 0;
  double loss = 0;
  bool skipped = false;             // fp16: the step changed nothing
  double tokens_per_second = 0;
  double mfu = 0;                   // 0 to 1; 0: not known
  std::int64_t resident_bytes = 0;  // 0: not known
  std::int64_t device_bytes = 0;    // 0: no device
  double seconds_left = 0;
};
// At most `columns` - 1 wide: the bar gets narrower first, then words at the end are left out.
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
  ~Progress() override;  // ends the line that was written over

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
