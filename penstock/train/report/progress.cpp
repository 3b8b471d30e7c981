#include "penstock/train/report/progress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/train/config/layout_text.h"
#include "penstock/train/report/metrics.h"

namespace penstock::train {

namespace {

constexpr int kWidestBar = 40;
constexpr int kNarrowestBar = 8;

// Failing to write progress must not end a run.
void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(file, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

// The terminal that the launcher was started from. Ranks are in a background process group of that terminal,
// which may be configured to stop background writers; blocking SIGTTOU lets them write.
class ControllingTerminal {
 public:
  explicit ControllingTerminal(int file) : file_(file) {}
  ControllingTerminal(const ControllingTerminal&) = delete;
  ControllingTerminal& operator=(const ControllingTerminal&) = delete;
  ~ControllingTerminal() { ::close(file_); }

  void write(std::string_view text) const {
    sigset_t blocked, before;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTTOU);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    write_all(file_, text);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

 private:
  int file_;
};

int columns_of(int file) {
  if (::isatty(file) != 1) return 0;
  winsize size{};
  return ::ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// In decreasing order of importance.
std::vector<std::string> words_of(const ProgressState& state) {
  std::vector<std::string> words{
      fmt::format("{:>{}}/{}", state.step, std::to_string(state.steps).size(), state.steps)};
  words.push_back(state.skipped ? fmt::format("loss {:.4f} (skipped)", state.loss)
                                : fmt::format("loss {:.4f}", state.loss));
  if (state.tokens_per_second > 0) words.push_back(format_token_rate(state.tokens_per_second));
  if (state.step < state.steps) words.push_back(format_duration(state.seconds_left) + " left");
  for (const LossTerm& term : state.auxiliary)
    words.push_back(fmt::format("{} {:.4g}", term.name, term.value));
  if (state.mfu > 0) words.push_back(fmt::format("MFU {:.1f} %", 100 * state.mfu));
  if (state.resident_bytes > 0)
    words.push_back(format_bytes(static_cast<std::uint64_t>(state.resident_bytes)));
  if (state.device_bytes > 0)
    words.push_back("device " + format_bytes(static_cast<std::uint64_t>(state.device_bytes)));
  return words;
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds >= 1e10) return "centuries";
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole >= 2 * 86400) return fmt::format("{} d {} h", whole / 86400, whole % 86400 / 3600);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole % 3600 / 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string format_token_rate(double rate) {
  if (rate < 999.5) return fmt::format("{:.0f} tok/s", rate);
  if (rate < 99950) return fmt::format("{:.1f} ktok/s", rate / 1e3);
  if (rate < 999500) return fmt::format("{:.0f} ktok/s", rate / 1e3);
  return fmt::format("{:.2f} Mtok/s", rate / 1e6);
}

std::string bar_line(const ProgressState& state, int columns) {
  const std::vector<std::string> words = words_of(state);
  const auto room = static_cast<std::size_t>(std::max(columns - 1, 1));  // some terminals wrap a full line
  std::string text;
  for (const std::string& word : words) {
    const std::size_t gap = text.empty() ? 0 : 2;
    if (!text.empty() && text.size() + gap + word.size() > room) break;
    text += std::string(gap, ' ') + word;
  }
  const auto left = static_cast<std::int64_t>(room) - static_cast<std::int64_t>(text.size()) -
                    4;  // brackets and two spaces
  if (left >= kNarrowestBar) {
    const auto width = static_cast<std::size_t>(std::min<std::int64_t>(left, kWidestBar));
    const double share =
        state.steps > 0
            ? std::clamp(static_cast<double>(state.step) / static_cast<double>(state.steps), 0.0, 1.0)
            : 0;
    const auto done = static_cast<std::size_t>(share * static_cast<double>(width));
    text = "[" + std::string(done, '#') + std::string(width - done, '-') + "]  " + text;
  }
  return text.substr(0, room);
}

std::string plain_line(const ProgressState& state) {
  std::string text = "step";
  for (const std::string& word : words_of(state)) text += (text.size() == 4 ? " " : "  ") + word;
  return text;
}

ProgressChoice choose_progress(const std::string& configured, const char* variable, int own_columns) {
  ProgressChoice choice{.columns = own_columns};
  if (variable != nullptr && *variable != '\0') {
    // The columns of the terminal; 0 if there is none.
    choice.columns = static_cast<int>(
        read_integer("environment variable PENSTOCK_PROGRESS_TTY", variable, 0, 1 << 20, "unset it"));
    choice.bypasses_launcher = choice.columns > 0;
  }
  if (configured == "none" || configured == "off") {
    choice.kind = ProgressKind::None;
  } else if (configured == "lines") {
    choice.kind = ProgressKind::Lines;
  } else if (configured == "bar") {
    choice.kind = ProgressKind::Bar;
    if (choice.columns == 0) choice.columns = 80;
  } else if (configured == "auto") {
    choice.kind = choice.columns > 0 ? ProgressKind::Bar : ProgressKind::Lines;
  } else {
    throw ConfigError(
        describe("output.progress", fmt::format("\"{}\"", configured), "auto, bar, lines or none"));
  }
  if (choice.kind != ProgressKind::Bar) choice.bypasses_launcher = false;
  return choice;
}

ProgressOptions progress_options(const OutputConfig& config) {
  const ProgressChoice choice =
      choose_progress(config.progress, std::getenv("PENSTOCK_PROGRESS_TTY"), columns_of(STDERR_FILENO));
  ProgressOptions options;
  options.kind = choice.kind;
  options.columns = choice.columns;
  if (choice.bypasses_launcher) {
    const int file = ::open("/dev/tty", O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (file >= 0) {
      const auto terminal = std::make_shared<ControllingTerminal>(file);
      options.write = [terminal](const std::string& text) { terminal->write(text); };
    } else {
      options.kind = ProgressKind::Lines;
    }
  }
  return options;
}

Progress::Progress(ProgressOptions options) : options_(std::move(options)) {
  if (!options_.write) options_.write = [](const std::string& text) { write_all(STDERR_FILENO, text); };
  if (!options_.clock) options_.clock = [] { return std::chrono::steady_clock::now(); };
}

Progress::~Progress() {
  if (bar_drawn_) options_.write("\n");
}

void Progress::event(const std::string& text) {
  if (options_.kind == ProgressKind::None) return;
  if (options_.kind == ProgressKind::Lines) return options_.write(text + "\n");
  options_.write((bar_drawn_ ? "\r\x1b[K" : "") + text + "\n" +
                 (state_.step > 0 ? bar_line(state_, options_.columns) : ""));
  bar_drawn_ = state_.step > 0;
}

void Progress::show(bool at_once) {
  if (options_.kind == ProgressKind::None) return;
  const Time now = options_.clock();
  if (!at_once && now < next_) return;
  const bool bar = options_.kind == ProgressKind::Bar;
  next_ = now + (bar ? options_.bar_pause : options_.line_pause);
  shown_ = state_.step;
  options_.write(bar ? "\r" + bar_line(state_, options_.columns) + "\x1b[K" : plain_line(state_) + "\n");
  bar_drawn_ = bar;
}

void Progress::on_start(const RunDescription& run) {
  run_ = run;
  state_ = {};
  state_.steps = run.config.training.steps;
  validation_.reset();
  tokens_ = 0;
  seconds_ = 0;
  shown_ = -1;
  begin_ = next_ = options_.clock();
  const LayoutConfig& layout = run.config.layout;
  event(fmt::format("{:.2f} M parameters on {} rank{} ({}): pp {}, dp {}, tp {}, {}, {} microbatches of {}",
                    static_cast<double>(run.parameters) / 1e6, run.ranks, run.ranks == 1 ? "" : "s",
                    run.device, layout.pp, dp_text(layout), layout.tp, layout.schedule, layout.microbatches,
                    layout.microbatch_size));
  event(fmt::format("run folder {}", run.folder.string()));
  if (!run.resumed_from.empty())
    event(fmt::format("continues after step {} from {}", run.first_step, run.resumed_from));
}

void Progress::on_step(const StepOutcome& outcome, const StepExtras& extras) {
  const bool first = state_.step == 0;
  state_.step = outcome.step;
  state_.loss = outcome.loss;
  state_.skipped = outcome.skipped;
  state_.auxiliary = outcome.auxiliary;
  state_.tokens_per_second = extras.tokens_per_second;
  state_.mfu = run_.peak_flops > 0 ? extras.tokens_per_second * run_.flops_per_token / run_.peak_flops : 0;
  state_.resident_bytes = extras.resident_bytes;
  state_.device_bytes = extras.device_bytes;
  state_.seconds_left = extras.seconds_left;
  tokens_ += outcome.tokens;
  seconds_ += outcome.times.total;
  std::int64_t captured_here = 0, loaded_here = 0;
  for (const CompiledForward& forward : outcome.compiled) {
    const bool captured = forward.source == "captured";
    ++(captured ? captured_here : loaded_here);
    const std::string how = !captured
                                ? fmt::format("loaded as graph {} from the {}", forward.graph, forward.source)
                            : forward.graph > 1 ? fmt::format("captured again as graph {}", forward.graph)
                                                : std::string("captured as a graph");
    event(fmt::format(
        "step {}: stage {} {}: {} operators{} in {:.2f} s{}", outcome.step, forward.stage, how, forward.nodes,
        forward.deferred > 0 ? fmt::format(" ({} of them in W)", forward.deferred) : std::string(),
        forward.seconds, forward.reason.empty() ? "" : ", because " + forward.reason));
  }
  const auto elsewhere = [&](std::int64_t graphs, const char* how) {
    if (graphs > 0)
      event(fmt::format("step {}: {} graph{} {} on other ranks", outcome.step, graphs, graphs == 1 ? "" : "s",
                        how));
  };
  elsewhere(outcome.first_captures + outcome.recaptures - captured_here, "captured");
  elsewhere(outcome.loads - loaded_here, "loaded");
  show(first || outcome.step == state_.steps);
}

void Progress::on_validation(std::int64_t step, double loss, double seconds) {
  validation_ = loss;
  // Show the training loss of the same step next to it.
  if (options_.kind == ProgressKind::Lines && state_.step == step && shown_ != step && step > 0) show(true);
  event(fmt::format("step {}: validation loss {:.4f} ({:.1f} s)", step, loss, seconds));
}

void Progress::on_checkpoint(std::int64_t step, const checkpoint::SaveStall& stall) {
  event(fmt::format("step {}: checkpoint saved, training paused for {:.0f} ms", step, 1e3 * stall.total()));
}

void Progress::on_trace(std::int64_t step, const std::filesystem::path& path) {
  event(fmt::format("step {}: timeline written to {}", step,
                    path.lexically_proximate(run_.folder).generic_string()));
}

void Progress::on_end(RunEnd end, std::int64_t step) {
  std::string text = fmt::format(
      "{} after step {} of {} in {}",
      end == RunEnd::Finished    ? "finished"
      : end == RunEnd::Stopped   ? "stopped"
      : end == RunEnd::TimeLimit ? "time limit reached"
                                 : "ended without saving the last checkpoint",
      step, state_.steps, format_duration(std::chrono::duration<double>(options_.clock() - begin_).count()));
  if (state_.step > 0) text += fmt::format(", loss {:.4f}", state_.loss);
  if (validation_) text += fmt::format(", validation loss {:.4f}", *validation_);
  if (seconds_ > 0) text += ", " + format_token_rate(static_cast<double>(tokens_) / seconds_);
  if (options_.kind == ProgressKind::None) return;
  options_.write((bar_drawn_ ? "\n" : "") + text + "\n");
  bar_drawn_ = false;
}

}  // namespace penstock::train
