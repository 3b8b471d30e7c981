// Shared by the benchmarks: timing, medians, pinning to a core, and reading the figures that another process
// prints.
#pragma once

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace penstock::bench {

using Clock = std::chrono::steady_clock;

inline double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Pins this thread and the threads it creates afterwards.
inline void pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(core) % std::max(1u, std::thread::hardware_concurrency()), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

// Names and numbers of one line: "step_ms 12.5 loss 0.3".
using Figure = std::map<std::string, double>;

// Runs a command and parses the last line of its output that begins with `first`.
inline Figure read_figure(const std::string& command, const std::string& first = "step_ms") {
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot start: " + command);
  Figure figure;
  char line[1024];
  while (fgets(line, sizeof line, pipe)) {
    std::istringstream words(line);
    std::string name;
    double value = 0;
    Figure read;
    while (words >> name >> value) read[name] = value;
    if (read.contains(first)) figure = std::move(read);
  }
  if (pclose(pipe) != 0 || figure.empty()) throw std::runtime_error("failed: " + command);
  return figure;
}

// "equal" if loss and gradient norm are equal up to rounding; otherwise what differs.
inline std::string same_training(const Figure& ours, const Figure& theirs) {
  for (const char* name : {"loss", "norm"})
    if (std::abs(ours.at(name) - theirs.at(name)) >= 1e-4 * std::abs(theirs.at(name)))
      return fmt::format("DIFFER: {} {} against {}", name, ours.at(name), theirs.at(name));
  return "equal";
}

inline std::string own_path() {
  std::string self(4096, '\0');
  self.resize(
      static_cast<std::size_t>(std::max<ssize_t>(0, readlink("/proc/self/exe", self.data(), self.size()))));
  return self;
}

// A shell command that starts this program once per rank, with the variables that `penstock launch` sets, and
// waits for all.
inline std::string launch_command(int world, int port, const std::string& arguments) {
  std::string command;
  for (int rank = world - 1; rank >= 0; --rank)
    command += fmt::format(
        "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=17179869184 MIMALLOC_PURGE_DELAY=-1 RANK={} "
        "WORLD_SIZE={} LOCAL_RANK={} "
        "LOCAL_WORLD_SIZE={} MASTER_ADDR=127.0.0.1 MASTER_PORT={} '{}' {}{}",
        rank, world, rank, world, port, own_path(), arguments, rank > 0 ? " & " : "; wait");
  return command;
}

}  // namespace penstock::bench
