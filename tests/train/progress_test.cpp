// The progress display, character by character.
#include "penstock/train/report/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>

#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/pseudo_terminal.h"
#include "tests/throws.h"
#include "tests/train/synthetic_run.h"

namespace penstock::test {
namespace progress_test {

using namespace train;
using namespace std::chrono_literals;

ProgressState some_state() {
  return {.step = 86,
          .steps = 200,
          .loss = 2.45128,
          .tokens_per_second = 15230,
          .mfu = 0.412,
          .resident_bytes = std::int64_t{312} << 20,
          .device_bytes = 0,
          .seconds_left = 31.4};
}

TEST(ProgressText, Durations) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(725), "12:05");
  EXPECT_EQ(format_duration(10931), "3:02:11");
  EXPECT_EQ(format_duration(183600), "2 d 3 h");
  EXPECT_EQ(format_duration(-1), "?");
  EXPECT_EQ(format_duration(1e300), "centuries");
}

TEST(ProgressText, TokenRates) {
  EXPECT_EQ(format_token_rate(950), "950 tok/s");
  EXPECT_EQ(format_token_rate(999.6), "1.0 ktok/s");
  EXPECT_EQ(format_token_rate(15230), "15.2 ktok/s");
  EXPECT_EQ(format_token_rate(368000), "368 ktok/s");
  EXPECT_EQ(format_token_rate(1250000), "1.25 Mtok/s");
}

TEST(ProgressText, BarsOfEveryWidth) {
  const ProgressState state = some_state();
  EXPECT_EQ(bar_line(state, 120),
            "[#################-----------------------]   86/200  loss 2.4513  15.2 ktok/s  0:31 left  MFU "
            "41.2 %  312.0 MiB");
  EXPECT_EQ(bar_line(state, 80),
            "[###-----]   86/200  loss 2.4513  15.2 ktok/s  0:31 left  MFU 41.2 %  312.0 MiB");
  EXPECT_EQ(bar_line(state, 40), " 86/200  loss 2.4513  15.2 ktok/s");
  EXPECT_EQ(bar_line(state, 5), " 86/");
  EXPECT_EQ(bar_line(state, 0), " ");
  for (int columns = 1; columns < 200; ++columns)
    EXPECT_LT(bar_line(state, columns).size(), static_cast<std::size_t>(std::max(columns, 2)));
}

// They come after what everybody wants to know, and go first where there is no room.
TEST(ProgressText, AuxiliaryLosses) {
  ProgressState state = some_state();
  state.auxiliary = {{.name = "balance", .value = 1.02345678, .weight = 0.01},
                     {.name = "router_z", .value = 0.00314159, .weight = 0.001}};
  EXPECT_EQ(
      plain_line(state),
      "step  86/200  loss 2.4513  15.2 ktok/s  0:31 left  balance 1.023  router_z 0.003142  MFU 41.2 %  "
      "312.0 MiB");
  EXPECT_EQ(bar_line(state, 66), " 86/200  loss 2.4513  15.2 ktok/s  0:31 left  balance 1.023");
}

TEST(ProgressText, UnknownValuesAreOmitted) {
  EXPECT_EQ(bar_line({.step = 200, .steps = 200, .loss = 2}, 50),
            "[" + std::string(25, '#') + "]  200/200  loss 2.0000");
  EXPECT_EQ(plain_line({.step = 200, .steps = 200, .loss = 2, .tokens_per_second = 900}),
            "step 200/200  loss 2.0000  900 tok/s");
  EXPECT_EQ(
      plain_line(
          {.step = 1, .steps = 20, .loss = 2, .skipped = true, .device_bytes = 1 << 30, .seconds_left = 3}),
      "step  1/20  loss 2.0000 (skipped)  0:03 left  device 1.0 GiB");
}

TEST(ProgressChoice, TheParentKnowsTheTerminal) {
  EXPECT_EQ(choose_progress("auto", "132", 0).kind, ProgressKind::Bar);
  EXPECT_EQ(choose_progress("auto", "132", 0).columns, 132);
  EXPECT_TRUE(choose_progress("auto", "132", 0).bypasses_launcher);
  EXPECT_EQ(choose_progress("auto", nullptr, 0).kind, ProgressKind::Lines);
  EXPECT_EQ(choose_progress("auto", "", 0).kind, ProgressKind::Lines);
  EXPECT_EQ(choose_progress("auto", nullptr, 90).kind, ProgressKind::Bar);
  EXPECT_FALSE(choose_progress("auto", nullptr, 90).bypasses_launcher);
  EXPECT_EQ(choose_progress("auto", "0", 90).kind, ProgressKind::Lines);
  EXPECT_EQ(choose_progress("lines", "132", 90).kind, ProgressKind::Lines);
  EXPECT_EQ(choose_progress("bar", nullptr, 0).kind, ProgressKind::Bar);
  EXPECT_EQ(choose_progress("bar", nullptr, 0).columns, 80);
  EXPECT_EQ(choose_progress("none", "132", 90).kind, ProgressKind::None);
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { choose_progress("auto", "wide", 0); }),
                       "PENSTOCK_PROGRESS_TTY: got \"wide\""));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([] { choose_progress("auto", "-3", 0); }), "PENSTOCK_PROGRESS_TTY"));
}

// A run at one step per second.
struct Shown {
  explicit Shown(ProgressKind kind, std::int64_t last = 200) {
    std::chrono::steady_clock::time_point now{};
    ProgressOptions options;
    options.kind = kind;
    options.columns = 100;
    options.write = [this](const std::string& part) { text += part; };
    options.clock = [&] { return now; };
    Progress progress(options);
    progress.on_start(made_description("/runs/first"));
    progress.on_validation(0, 5.7, 0.8);
    for (std::int64_t step = 1; step <= last; ++step) {
      now += 1s;
      tell_steps(progress, step - 1, step);
      if (step == 10) progress.on_trace(10, "/runs/first/traces/step-00000010.json");
    }
    progress.on_end(last == 200 ? RunEnd::Finished : RunEnd::Stopped, last);
  }
  std::size_t count(const std::string& part) const {
    std::size_t found = 0;
    for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
    return found;
  }
  std::string text;
};

TEST(Progress, LinesWithoutATerminal) {
  const Shown shown(ProgressKind::Lines);
  EXPECT_EQ(shown.text.substr(0, shown.text.find("step   6")),
            "1.23 M parameters on 2 ranks (cpu): pp 2, dp 1, tp 1, 1F1B, 8 microbatches of 2\n"
            "run folder /runs/first\n"
            "step 0: validation loss 5.7000 (0.8 s)\n"
            "step   1/200  loss 5.4798  15.7 ktok/s  0:50 left  MFU 39.3 %  300.0 MiB\n");
  EXPECT_EQ(shown.count("\r"), 0u);
  EXPECT_EQ(shown.count("\x1b"), 0u);
  EXPECT_TRUE(has_text(shown.text, "step 10: timeline written to traces/step-00000010.json\n"));
  EXPECT_TRUE(has_text(shown.text, "step 100: checkpoint saved, training paused for 13 ms\n"));
  // Every fifth second, and the validated steps.
  EXPECT_EQ(shown.count("step  50/200"), 1u);
  EXPECT_EQ(shown.count("step 100/200"), 1u);
  EXPECT_EQ(shown.count("step 200/200"), 1u);
  EXPECT_GE(shown.count("ktok/s  0:"), 40u);
  EXPECT_LE(shown.count("ktok/s  0:"), 45u);
  EXPECT_TRUE(has_text(shown.text, "finished after step 200 of 200 in 3:20, loss 2."));
}

TEST(Progress, SaysWhatIsCompiled) {
  std::string text;
  ProgressOptions options;
  options.kind = ProgressKind::Lines;
  options.write = [&](const std::string& part) { text += part; };
  Progress progress(options);
  progress.on_start(made_description("/runs/first"));
  StepOutcome outcome = made_step(1);
  outcome.compiled = {
      {.stage = 0, .graph = 1, .nodes = 412, .deferred = 31, .seconds = 0.35},
      {.stage = 2, .graph = 2, .nodes = 400, .seconds = 0.25, .reason = "args[0] has sizes [1]"},
      {.stage = 4, .graph = 1, .nodes = 300, .seconds = 0.02, .source = "artifact"}};
  outcome.first_captures = 2;
  outcome.recaptures = 1;
  outcome.loads = 3;
  progress.on_step(outcome, made_extras(1));
  EXPECT_TRUE(
      has_text(text, "step 1: stage 0 captured as a graph: 412 operators (31 of them in W) in 0.35 s\n"));
  EXPECT_TRUE(
      has_text(text,
               "step 1: stage 2 captured again as graph 2: 400 operators in 0.25 s, because args[0] has "
               "sizes [1]\n"));
  EXPECT_TRUE(has_text(text, "step 1: 1 graph captured on other ranks\n"));
  EXPECT_TRUE(
      has_text(text, "step 1: stage 4 loaded as graph 1 from the artifact: 300 operators in 0.02 s\n"));
  EXPECT_TRUE(has_text(text, "step 1: 2 graphs loaded on other ranks\n"));
}

TEST(Progress, OneLineIsOverwrittenOnATerminal) {
  const Shown shown(ProgressKind::Bar);
  EXPECT_EQ(shown.count("\r["), 200u);
  // Start, folder, five validations, two checkpoints, the trace, the bar itself and the end.
  EXPECT_EQ(shown.count("\n"), 2u + 5 + 2 + 1 + 1 + 1);
  EXPECT_TRUE(has_text(shown.text, "\r\x1b[Kstep 50: validation loss "));
  EXPECT_EQ(shown.text.back(), '\n');
}

TEST(Progress, AStoppedRunSaysSo) {
  EXPECT_TRUE(has_text(Shown(ProgressKind::Lines, 7).text, "stopped after step 7 of 200 in 0:07"));
}

TEST(Progress, KindNoneWritesNothing) { EXPECT_EQ(Shown(ProgressKind::None).text, ""); }

// A rank as started by its launcher: in the background of a terminal that stops background writers, with
// output redirected elsewhere.
int show_as_a_rank() {
  setpgid(0, 0);
  const int nowhere = ::open("/dev/null", O_RDWR);
  for (const int file : {0, 1, 2}) ::dup2(nowhere, file);
  ::setenv("PENSTOCK_PROGRESS_TTY", "100", 1);
  Progress progress(progress_options(OutputConfig{}));
  progress.on_start(made_description("/runs/first"));
  tell_steps(progress, 0, 1);
  progress.on_end(RunEnd::Stopped, 1);
  return 0;
}

TEST(Progress, ABarOfARankReachesTheTerminalOfItsLauncher) {
  if (!has_pseudo_terminals()) GTEST_SKIP() << "this system has no pseudo terminals";
  int terminal = -1;
  const pid_t launcher = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(launcher, 0);
  if (launcher == 0) {
    termios settings{};
    ::tcgetattr(0, &settings);
    settings.c_lflag |= TOSTOP;
    ::tcsetattr(0, TCSANOW, &settings);
    const pid_t rank = ::fork();
    if (rank == 0) ::_exit(show_as_a_rank());
    int status = 0;
    ::waitpid(rank, &status, WUNTRACED);
    if (WIFSTOPPED(status)) ::kill(rank, SIGKILL);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 9);
  }
  std::string text;
  char block[4096];
  for (ssize_t count; (count = ::read(terminal, block, sizeof block)) > 0;)
    text.append(block, static_cast<std::size_t>(count));
  int status = 0;
  ::waitpid(launcher, &status, 0);
  ::close(terminal);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(has_text(text, "run folder /runs/first"));
  EXPECT_TRUE(has_text(text, "\r[---"));
  EXPECT_TRUE(has_text(text, "1/200  loss 5.4798"));
  EXPECT_TRUE(has_text(text, "stopped after step 1 of 200"));
}

}  // namespace progress_test
}  // namespace penstock::test
