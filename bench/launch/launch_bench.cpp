// The time from the launch command to the first step on one machine, for a growing number of ranks: `penstock
// launch` with a program that does nothing and with one that joins the world, `penstock train`, and
// optionally torchrun.
//
//   launch_bench                                             2, 8, 32 and 64 ranks
//   launch_bench --peer "python3 -m torch.distributed.run"   compared with torchrun, with the same program
//   launch_bench --ranks 2,4 --start empty,barrier,train --repeats 3
//
// --start: "empty" is a program that joins nothing, and its first step is its first instruction; "barrier" is
// a program of Penstock that joins the world and waits in one barrier, and its first step is the end of the
// barrier; "train" is `penstock train` with a tiny model, and its first step is the line with its first loss.
// "death" is something else: the ranks wait in a barrier, the last one is killed, and "noticed" is the time
// until the last of the others has the error that names it.
//
// "first" is the time until the last rank is in its first step, "whole" until the launcher has ended; medians
// over the repeats. "growth" is the time of a rank relative to the row before: at most 1 if the time grows
// linearly or slower. The peer starts the empty program, alternating with Penstock; its ratios are medians
// over the repeats. Times depend on the machine; compare ratios.
#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "penstock/base/files.h"

namespace {

using namespace penstock;
using penstock::bench::Clock;
using penstock::bench::median;
using penstock::bench::ms_since;
namespace fs = std::filesystem;

struct Config {
  std::vector<int> ranks{2, 8, 32, 64};
  std::vector<std::string> starts{"empty", "barrier"};
  int repeats = 5;
  std::string penstock;  // path of the command
  std::string peer;      // command of torchrun
};

// Milliseconds after the command was started.
struct Timing {
  double first = 0, whole = 0;
};

struct Timings {
  std::vector<double> first, whole;
  void add(const Timing& timing) {
    first.push_back(timing.first);
    whole.push_back(timing.whole);
  }
};

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A folder for arrivals, outputs, data and runs; removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (fs::temp_directory_path() / "penstock_launch_bench_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no folder " + pattern);
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    remove_tree(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  fs::path arrivals() const { return path_ / "arrivals"; }
  fs::path output() const { return path_ / "output"; }
  fs::path run() const { return path_ / "run"; }

  // A few files of text to train on.
  fs::path text() const {
    const fs::path folder = path_ / "text";
    if (fs::exists(folder)) return folder;
    fs::create_directory(folder);
    for (int file = 0; file < 40; ++file) {
      std::ofstream out(folder / fmt::format("{}.h", file));
      for (int line = 0; line < 60; ++line)
        out << fmt::format("int value_{} = {};\n", file * line % 7, file + line);
    }
    return folder;
  }

 private:
  fs::path path_;
};

// The ranks of a program write the time of their first step to a file; the clock is that of the machine.
std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Starts a shell command; both of its streams go to `output`.
pid_t start(const std::string& command, int output) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("cannot start: " + command);
  if (child == 0) {
    dup2(output, 1);
    dup2(output, 2);
    execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  return child;
}

void expect_success(pid_t child, const std::string& command, const std::string& output) {
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw std::runtime_error(fmt::format("failed: {}\n{}", command, output.empty() ? "" : contents(output)));
}

// A command whose ranks write their arrivals.
Timing time_of_arrivals(const Scratch& scratch, const std::string& command, int ranks) {
  std::ofstream(scratch.arrivals(), std::ios::trunc).flush();
  const int output = open(scratch.output().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const auto begin = Clock::now();
  const std::int64_t begin_ns = now_ns();
  const pid_t child = start(command, output);
  close(output);
  expect_success(child, command, scratch.output());
  Timing timing;
  timing.whole = ms_since(begin);
  std::ifstream file(scratch.arrivals());
  int arrived = 0;
  for (std::int64_t ns = 0; file >> ns; ++arrived)
    timing.first = std::max(timing.first, static_cast<double>(ns - begin_ns) / 1e6);
  if (arrived != ranks)
    throw std::runtime_error(fmt::format("{} of {} ranks arrived: {}", arrived, ranks, command));
  return timing;
}

// A command that prints its losses.
Timing time_of_first_loss(const std::string& command) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  const auto begin = Clock::now();
  const pid_t child = start(command, ends[1]);
  close(ends[1]);
  Timing timing;
  std::string all, line;
  char part[4096];
  for (ssize_t bytes = 0; (bytes = read(ends[0], part, sizeof part)) > 0;) {
    all.append(part, static_cast<std::size_t>(bytes));
    if (timing.first == 0 && all.find("loss ") != std::string::npos) timing.first = ms_since(begin);
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  timing.whole = ms_since(begin);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || timing.first == 0)
    throw std::runtime_error(fmt::format("failed: {}\n{}", command, all));
  return timing;
}

class Bench {
 public:
  explicit Bench(const Config& config)
      : config_(config), folder_(fs::path(bench::own_path()).parent_path().string()) {
    if (config_.penstock.empty()) config_.penstock = folder_ + "/penstock";
  }

  void run() {
    fmt::print("{} cores; medians of {} repeats\n", std::thread::hardware_concurrency(), config_.repeats);
    for (const std::string& kind : config_.starts) {
      if (kind == "death") {
        fmt::print("\n{:<8}{:>7}{:>13}{:>13}\n", kind, "ranks", "noticed", "at most");
        for (const int ranks : config_.ranks) row_of_death(ranks);
        continue;
      }
      const bool compares = kind == "empty" && !config_.peer.empty();
      fmt::print(
          "\n{:<8}{:>7}{:>13}{:>13}{:>14}{:>9}{}\n", kind, "ranks", "first", "whole", "per rank", "growth",
          compares ? fmt::format("{:>15}{:>15}{:>9}{:>9}", "peer first", "peer whole", "ratio", "whole")
                   : "");
      double former = 0;  // time of a rank
      for (const int ranks : config_.ranks) former = row(kind, ranks, compares, former);
    }
  }

 private:
  // Returns the time per rank.
  double row(const std::string& kind, int ranks, bool compares, double former) {
    Timings ours, peer;
    once(kind, ranks);  // reads programs and libraries from the disk
    if (compares) once_of_peer(ranks);
    for (int repeat = 0; repeat < config_.repeats; ++repeat) {
      ours.add(once(kind, ranks));
      if (compares) peer.add(once_of_peer(ranks));
    }
    const double each = median(ours.first) / ranks;
    fmt::print("{:<8}{:>7}{:>10.1f} ms{:>10.1f} ms{:>11.2f} ms{:>9}", "", ranks, median(ours.first),
               median(ours.whole), each, former > 0 ? fmt::format("{:.2f}", each / former) : "");
    if (compares)
      fmt::print("{:>12.1f} ms{:>12.1f} ms{:>9.2f}{:>9.2f}", median(peer.first), median(peer.whole),
                 ratio(ours.first, peer.first), ratio(ours.whole, peer.whole));
    fmt::print("\n");
    std::fflush(stdout);
    return each;
  }

  void row_of_death(int ranks) const {
    std::vector<double> noticed;
    for (int repeat = 0; repeat < config_.repeats; ++repeat) noticed.push_back(time_to_notice(ranks));
    fmt::print("{:<8}{:>7}{:>10.1f} ms{:>10.1f} ms\n", "", ranks, median(noticed),
               *std::max_element(noticed.begin(), noticed.end()));
    std::fflush(stdout);
  }

  // Milliseconds from the death of one rank until all others have noticed it.
  double time_to_notice(int ranks) const {
    std::ofstream(scratch_.arrivals(), std::ios::trunc).flush();
    const int output = open(scratch_.output().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const std::string command =
        fmt::format("'{}' launch -n {} --no-prefix --grace 60 -- '{}' --death '{}'", config_.penstock, ranks,
                    folder_ + "/launch_bench_rank", scratch_.arrivals().string());
    const pid_t child = start(command, output);
    close(output);
    waitpid(child, nullptr, 0);  // with the exit code of a killed rank
    std::ifstream file(scratch_.arrivals());
    std::vector<std::int64_t> times;  // the first one is that of the death
    for (std::int64_t ns = 0; file >> ns;) times.push_back(ns);
    if (static_cast<int>(times.size()) != ranks)
      throw std::runtime_error(fmt::format("{} of {} ranks noticed the death of the last: {}\n{}",
                                           times.empty() ? 0 : times.size() - 1, ranks - 1, command,
                                           contents(scratch_.output())));
    return static_cast<double>(*std::max_element(times.begin(), times.end()) - times.front()) / 1e6;
  }

  static double ratio(const std::vector<double>& ours, const std::vector<double>& peer) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / peer[i]);
    return median(ratios);
  }

  Timing once(const std::string& kind, int ranks) const {
    if (kind == "train") return once_of_training(ranks);
    const std::string program = kind == "empty" ? bench::own_path() : folder_ + "/launch_bench_rank";
    return time_of_arrivals(
        scratch_,
        fmt::format("'{}' launch -n {} --no-prefix -- {}", config_.penstock, ranks, program_words(program)),
        ranks);
  }

  Timing once_of_peer(int ranks) const {
    return time_of_arrivals(scratch_,
                            fmt::format("{} --nproc-per-node {} --no-python {}", config_.peer, ranks,
                                        program_words(bench::own_path())),
                            ranks);
  }

  std::string program_words(const std::string& program) const {
    return fmt::format("'{}' --arrive '{}'", program, scratch_.arrivals().string());
  }

  Timing once_of_training(int ranks) const {
    remove_tree(scratch_.run());
    return time_of_first_loss(fmt::format(
        "'{}' train --data '{}' --run_folder '{}' --preset tiny --width 32 --layers 1 --heads 2 "
        "--key_value_heads 2 --feed_width 64 --context 32 --pp 1 --dp {} --microbatches 1 --microbatch_size "
        "1 --steps 1 --warmup_steps 0 --validate_every 0 --validation_fraction 0.2 --checkpoint.every 0 "
        "--sample_tokens 0 --trace_steps 0 --progress lines --device cpu",
        config_.penstock, scratch_.text().string(), scratch_.run().string(), ranks));
  }

  Config config_;
  const std::string folder_;  // of the built programs
  Scratch scratch_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t arrived = now_ns();
  Config config;
  std::string arrivals;
  CLI::App app("Measures the time from the launch command to the first step", "launch_bench");
  app.add_option("--ranks", config.ranks, "numbers of ranks, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  app.add_option("--start", config.starts,
                 "what is started: empty, barrier, train; or death: how soon a death is noticed")
      ->delimiter(',')
      ->check(CLI::IsMember({"empty", "barrier", "train", "death"}));
  app.add_option("--repeats", config.repeats, "launches of each kind")->check(CLI::PositiveNumber);
  app.add_option("--penstock", config.penstock, "path of penstock (default: beside this program)");
  app.add_option("--peer", config.peer, "command of torchrun: \"python3 -m torch.distributed.run\"");
  app.add_option("--arrive", arrivals, "internal: write the time to this file and end")->group("");
  app.footer("Example:\n  launch_bench --ranks 2,8 --peer \"python3 -m torch.distributed.run\"");
  CLI11_PARSE(app, argc, argv);
  if (!arrivals.empty()) {
    const int file = open(arrivals.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    const std::string line = fmt::format("{}\n", arrived);
    return file >= 0 && write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size()) ? 0 : 1;
  }
  try {
    Bench(config).run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "launch_bench: {}\n", error.what());
    return 1;
  }
}
