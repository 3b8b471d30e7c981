// `penstock doctor`: shows what this machine has, and tests whether ranks can communicate on it.
#include <fmt/format.h>
#include <spdlog/version.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/tensor/doctor_threads.h"
#include "penstock/comm/backend/backend.h"
#include "penstock/comm/group/self_test.h"
#include "penstock/comm/launch/launch_cores.h"
#include "penstock/comm/launch/launcher.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/thread_count.h"
#include "penstock/torch/compat/version.h"
#include "penstock/world.h"

namespace penstock::cli {

namespace {

// A temporary file that is removed with the object.
class TemporaryFile {
 public:
  TemporaryFile() {
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
    if (error)
      throw ConfigError(describe("temporary folder", error.message(), "a writable folder", "set TMPDIR"));
    std::string pattern = (folder / "penstock-doctor-XXXXXX").string();
    const int fd = mkstemp(pattern.data());
    if (fd < 0)
      throw StateError(
          fmt::format("cannot create a temporary file named {}; check that the folder is writable", pattern));
    close(fd);
    path_ = pattern;
  }
  ~TemporaryFile() {
    std::error_code ignored;  // do not fail because of a leftover temporary file
    std::filesystem::remove(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::uint64_t memory_bytes() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGE_SIZE));
}

void print_machine() {
  fmt::print("penstock {}\n", PENSTOCK_VERSION);
  fmt::print("  LibTorch    {}\n", torch_version());
  fmt::print("  BLAS        {}\n", blas_description());
  fmt::print("  compiler    g++ {}\n", __VERSION__);
  fmt::print("  cores       {} ({} usable by this process)\n", sysconf(_SC_NPROCESSORS_ONLN),
             comm::available_cores());
  fmt::print("  memory      {}\n", format_bytes(memory_bytes()));
  fmt::print("  GPUs        {}\n",
             torch::cuda::is_available() ? fmt::format("{}", torch::cuda::device_count()) : "none");
  fmt::print("  backends    gloo {}, nccl {}, ucx {}\n", comm::gloo_available() ? "yes" : "no",
             comm::nccl_available() ? comm::nccl_version() : "no",
             comm::ucx_available() ? comm::ucx_version() : "no");
}

// A feed-forward layer: two matrix products with an activation between them, so that BLAS threads and
// LibTorch's own threads alternate as in training.
double layer_gflops(int threads, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kRows = 512, kWidth = 256, kHidden = 1024;
  const ThreadCountScope scope(threads);
  const at::NoGradGuard no_grad;
  const at::Tensor rows = at::ones({kRows, kWidth}), up = at::full({kWidth, kHidden}, 0.01),
                   down = at::full({kHidden, kWidth}, 0.01);
  const auto layer = [&] { return at::mm(at::gelu(at::mm(rows, up)), down); };
  layer();  // the first use starts the threads
  int layers = 0;
  const auto start = Clock::now();
  double elapsed = 0;
  while (layers < 3 || elapsed < seconds) {
    layer();
    ++layers;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return 2.0 * 2.0 * kRows * kWidth * kHidden * layers / elapsed / 1e9;
}

// The best of several short rounds in alternation: load that lasts a moment does not count, permanent load
// does.
constexpr int kRounds = 4;
constexpr double kRoundSeconds = 0.08;

// Runs in a process started by the launcher: the environment determines how its threads wait.
ThreadSpeeds measure_thread_speeds() {
  ThreadSpeeds result;
  result.blas = comm::loaded_blas_threads();
  const int most = thread_counts().operators;
  for (int threads = 1; threads < most; threads *= 2) result.speeds.push_back({threads, 0});
  result.speeds.push_back({most, 0});
  for (int round = 0; round < kRounds; ++round)
    for (ThreadSpeed& speed : result.speeds)
      speed.gflops = std::max(speed.gflops, layer_gflops(speed.threads, kRoundSeconds));
  return result;
}

// Runs inside each spawned rank and writes the results.
int run_probe(const std::string& device_name, const std::string& report_path) {
  if (device_name == "threads") {
    write_thread_speeds(measure_thread_speeds(), report_path);
    return 0;
  }
  if (device_name == "cuda" && !torch::cuda::is_available())
    throw ConfigError(describe("--probe", "cuda, without a GPU", "cpu"));
  comm::World world = comm::World::from_env();
  const at::Device device =
      device_name == "cuda"
          ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(world.local_rank() %
                                                               static_cast<int>(torch::cuda::device_count())))
          : at::Device(at::kCPU);
  comm::Group group = world.group();
  const auto results = comm::self_test(group, device);
  bool ok = true;
  nlohmann::json report = nlohmann::json::array();
  for (const auto& result : results) {
    ok = ok && result.ok;
    report.push_back({{"operation", result.operation},
                      {"ok", result.ok},
                      {"error", result.error},
                      {"latency_us", result.latency_us},
                      {"bandwidth_gbs", result.bandwidth_gbs}});
  }
  // Every rank must have seen the right values; rank 0 writes for all of them.
  const at::Tensor agreed = at::tensor({ok ? 1 : 0}, at::TensorOptions().dtype(at::kInt).device(device));
  group.all_reduce(agreed, comm::ReduceOp::Min).wait();
  if (world.rank() == 0)
    std::ofstream(report_path) << nlohmann::json{{"backends", group.describe_backends()},
                                                 {"results", report}};
  return agreed.item<int>() == 1 ? 0 : 1;
}

struct Setup {
  const char* title;
  const char* device;
  const char* p2p;
  int ranks;
};

bool print_report(const Setup& setup, const std::string& path, int exit_code, bool all_rows) {
  nlohmann::json report;
  try {
    report = nlohmann::json::parse(std::ifstream(path));
  } catch (const nlohmann::json::exception&) {
    fmt::print("\n{}: FAILED, the ranks exited with code {} before they could report\n", setup.title,
               exit_code);
    return false;
  }
  int good = 0;
  std::string failures, timings;
  for (const auto& row : report.at("results")) {
    const std::string name = row.at("operation");
    if (row.at("ok").get<bool>()) {
      ++good;
    } else {
      failures += fmt::format("  {:<28} FAILED: {}\n", name, row.at("error").get<std::string>());
    }
    const double latency = row.at("latency_us"), bandwidth = row.at("bandwidth_gbs");
    if (all_rows || latency > 0 || bandwidth > 0)
      timings +=
          fmt::format("  {:<28} {:<12} {}\n", name, latency > 0 ? fmt::format("{:.1f} us", latency) : "",
                      bandwidth > 0 ? fmt::format("{:.2f} GB/s", bandwidth) : "");
  }
  const auto total = report.at("results").size();
  fmt::print("\n{} ({}): {} of {} operations ok\n{}{}", setup.title, report.at("backends").get<std::string>(),
             good, total, timings, failures);
  return exit_code == 0 && good == static_cast<int>(total);
}

// Starts this program as ranks that write to `report`. Returns their exit code.
int launch_probe(const std::string& what, int ranks, const std::string& report, int timeout_s,
                 std::vector<std::pair<std::string, std::string>> environment) {
  std::fflush(stdout);
  comm::LaunchOptions options;
  options.ranks = ranks;
  options.command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                     "doctor",
                     "--probe",
                     what,
                     "--report",
                     report};
  options.environment = std::move(environment);
  options.environment.emplace_back("PENSTOCK_TIMEOUT_S", std::to_string(timeout_s));
  options.environment.emplace_back("PENSTOCK_LOG", "error");
  return comm::launch(options).exit_code;
}

// In a rank of its own, with the thread settings of a training run.
bool check_threads(int timeout_s) {
  const TemporaryFile report;
  const int exit_code = launch_probe("threads", 1, report.path(), timeout_s, {});
  if (exit_code != 0) {
    fmt::print("\nthreads: FAILED, the measuring process exited with code {}\n", exit_code);
    return false;
  }
  fmt::print("\n{}", describe_thread_speeds(read_thread_speeds(report.path())));
  return true;
}

int run_doctor(bool all_rows, int timeout_s) {
  print_machine();
  bool ok = check_threads(timeout_s);
  std::vector<Setup> setups;
  if (comm::gloo_available()) setups.push_back({"gloo, 2 ranks", "cpu", "gloo", 2});
  if (comm::gloo_available() && comm::ucx_available()) setups.push_back({"ucx, 2 ranks", "cpu", "ucx", 2});
  const auto gpus = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;
  if (comm::nccl_available() && gpus > 0)
    setups.push_back(
        {gpus > 1 ? "nccl, 2 ranks" : "nccl, 1 rank (one GPU)", "cuda", "gloo", gpus > 1 ? 2 : 1});
  if (comm::gloo_available() && gpus == 1)
    setups.push_back({"CUDA tensors over gloo, 2 ranks on one GPU", "cuda", "gloo", 2});
  ok = ok && !setups.empty();
  if (setups.empty()) fmt::print("\nno backend: ranks cannot communicate; install libgloo-dev and rebuild\n");
  for (const Setup& setup : setups) {
    const TemporaryFile report;
    const int exit_code =
        launch_probe(setup.device, setup.ranks, report.path(), timeout_s, {{"PENSTOCK_P2P", setup.p2p}});
    ok = print_report(setup, report.path(), exit_code, all_rows) && ok;
  }
  fmt::print("\n{}\n", ok ? "all checks passed" : "some checks failed: see above");
  return ok ? 0 : 1;
}

}  // namespace

void add_doctor_command(CLI::App& app, CommandOutcome& outcome) {
  struct Flags {
    bool verbose = false;
    int timeout_s = 60;
    std::string probe, report;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = add_tensor_subcommand(app, "doctor");
  command->footer(
      "Example: penstock doctor --verbose\nExit code 1 if an operation returns wrong values or fails; slow "
      "threads are a warning.");
  command->add_flag("-v,--verbose", flags->verbose, "List every operation, not only the timed ones");
  add_whole(*command, "--timeout", flags->timeout_s, 1, 3600, "Time limit per backend in seconds")
      ->type_name("S");
  command->add_option("--probe", flags->probe, "Internal: run as one of the ranks")
      ->check(CLI::IsMember({"cpu", "cuda", "threads"}))
      ->group("");
  command->add_option("--report", flags->report, "Internal: file to write")->group("");
  command->callback([flags, &outcome] {
    outcome.exit_code = flags->probe.empty() ? run_doctor(flags->verbose, flags->timeout_s)
                                             : run_probe(flags->probe, flags->report);
  });
}

}  // namespace penstock::cli
