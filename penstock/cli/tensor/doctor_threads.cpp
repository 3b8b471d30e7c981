#include "penstock/cli/tensor/doctor_threads.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::cli {

namespace {

// Smaller differences are noise.
constexpr double kSlower = 0.9;

std::string warnings(const ThreadSpeeds& measured) {
  const ThreadSpeed& most = measured.speeds.back();
  const auto best = std::max_element(measured.speeds.begin(), measured.speeds.end(),
                                     [](const auto& a, const auto& b) { return a.gflops < b.gflops; });
  std::string text;
  if (most.gflops < kSlower * best->gflops)
    text += fmt::format(
        "  warning: {} threads compute at {:.2f} times the speed of {}; stop other programs that use the "
        "cores, or set OMP_NUM_THREADS={}\n",
        most.threads, most.gflops / best->gflops, best->threads, best->threads);
  if (measured.blas == comm::BlasThreads::OwnPool && most.threads > 1)
    text +=
        "  warning: this OpenBLAS has its own thread pool, which competes with OpenMP's for the cores; "
        "install libopenblas0-openmp\n";
  return text;
}

}  // namespace

void write_thread_speeds(const ThreadSpeeds& speeds, const std::string& path) {
  nlohmann::json rows = nlohmann::json::array();
  for (const ThreadSpeed& speed : speeds.speeds) rows.push_back({speed.threads, speed.gflops});
  std::ofstream(path) << nlohmann::json{{"blas", static_cast<int>(speeds.blas)}, {"speeds", rows}};
}

ThreadSpeeds read_thread_speeds(const std::string& path) {
  ThreadSpeeds result;
  try {
    std::ifstream file(path);
    const nlohmann::json json = nlohmann::json::parse(file);
    result.blas = static_cast<comm::BlasThreads>(json.at("blas").get<int>());
    for (const auto& row : json.at("speeds"))
      result.speeds.push_back({row.at(0).get<int>(), row.at(1).get<double>()});
  } catch (const nlohmann::json::exception&) {
    result.speeds.clear();
  }
  if (result.speeds.empty())
    throw StateError(describe("thread speeds", path, "a report of the measuring process",
                              "free space in the temporary folder, or set TMPDIR"));
  return result;
}

std::string describe_thread_speeds(const ThreadSpeeds& speeds) {
  std::string text =
      fmt::format("threads: matrix products and activations, float32{}\n",
                  speeds.blas == comm::BlasThreads::OpenMp ? ", OpenBLAS on OpenMP's threads" : "");
  for (const ThreadSpeed& speed : speeds.speeds)
    fmt::format_to(std::back_inserter(text), "  {:>2} {:<8} {:7.1f} GFLOP/s  {:.2f}x\n", speed.threads,
                   speed.threads == 1 ? "thread" : "threads", speed.gflops,
                   speed.gflops / speeds.speeds.front().gflops);
  return text + warnings(speeds);
}

}  // namespace penstock::cli
