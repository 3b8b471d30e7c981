// All-reduce between two hosts: Penstock's group beside c10d's ProcessGroupGloo called directly, in one run.
//
//   two_hosts_bench                           64 MB, unshaped and at 1 Gbit/s
//   two_hosts_bench --megabytes 8 --repeats 30 --rates 100mbit,1gbit
//
// The hosts are two network namespaces joined by a virtual cable (veth), which this program makes and which
// end with it. Needs `ip`, and the right to create network namespaces (root). --rates: further rows at these
// rates, made by the token bucket of `tc` on both ends of the cable; left out if there is no `tc`.
//
// Both sides alternate; times are medians on rank 0, the ratio is the median of c10d's time over Penstock's
// in each repeat: at least 1 if Penstock is not slower. Times depend on the machine; compare ratios.
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/comm/direct_gloo.h"
#include "bench/figures.h"
#include "penstock/base/leave_process.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/torch/compat/version.h"
#include "penstock/world.h"

namespace {

using namespace penstock;
using penstock::bench::Clock;
using penstock::bench::median;
using penstock::bench::ms_since;

constexpr int kHosts = 2;
constexpr int kWarmup = 2;
constexpr std::chrono::milliseconds kLimit{60'000};

struct Config {
  std::int64_t megabytes = 64;
  int repeats = 15;
  std::vector<std::string> rates{"1gbit"};
};

std::string address_of(int host) { return fmt::format("10.77.0.{}", host + 1); }
std::string interface_of(int host) { return fmt::format("cable{}", host); }

bool succeeds(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// ------------------------------------------------------------------------------------------------- one rank

class Rank {
 public:
  explicit Rank(const Config& config)
      : config_(config),
        world_(comm::World::from_env()),
        direct_(world_, address_of(world_.rank())),
        tensor_(at::zeros({config.megabytes * (std::int64_t{1} << 20) / 4})) {}

  void run() {
    if (world_.rank() == 0) {
      fmt::print("LibTorch {}, two hosts on {} cores; all_reduce of {} MB, medians of {}\n\n",
                 torch_version(), std::thread::hardware_concurrency(), config_.megabytes, config_.repeats);
      fmt::print("{:<12}{:>14}{:>14}{:>14}{:>10}\n", "cable", "c10d", "penstock", "Gbit/s", "ratio");
    }
    measure("unshaped");
    if (!config_.rates.empty() && !succeeds("command -v tc")) {
      if (world_.rank() == 0) fmt::print("no other rates: tc is not installed\n");
      return;
    }
    for (const std::string& rate : config_.rates) {
      // Both hosts are on one machine: either both can shape or none.
      const std::string device = "dev " + interface_of(world_.rank());
      const bool shaped = succeeds(
          fmt::format("tc qdisc replace {} root tbf rate {} burst 512kb latency 50ms", device, rate));
      if (!shaped) {
        if (world_.rank() == 0) fmt::print("{:<12}not measured: tc does not accept it\n", rate);
        continue;
      }
      measure(rate);
      succeeds(fmt::format("tc qdisc del {} root", device));
    }
  }

 private:
  void measure(const std::string& cable) {
    std::vector<double> theirs, ours, ratios;
    for (int repeat = -kWarmup; repeat < config_.repeats; ++repeat) {
      // Whoever comes second may find the caches warmer.
      std::array<double, 2> ms{};
      for (const int turn : {0, 1}) {
        const int side = (turn + repeat + kWarmup) % 2;
        world_.group().barrier().wait();
        const auto begin = Clock::now();
        if (side == 0) {
          std::vector<at::Tensor> tensors = {tensor_};
          direct_->allreduce(tensors)->wait(kLimit);
        } else {
          world_.group().all_reduce(tensor_).wait();
        }
        ms[static_cast<std::size_t>(side)] = ms_since(begin);
      }
      if (repeat < 0) continue;
      theirs.push_back(ms[0]);
      ours.push_back(ms[1]);
      ratios.push_back(ms[0] / ms[1]);
    }
    if (world_.rank() != 0) return;
    // With two ranks, each sends half of the data twice.
    const double gbit_s = static_cast<double>(tensor_.nbytes()) * 8 / (median(ours) * 1e6);
    fmt::print("{:<12}{:>11.1f} ms{:>11.1f} ms{:>14.2f}{:>10.2f}\n", cable, median(theirs), median(ours),
               gbit_s, median(ratios));
    std::fflush(stdout);
  }

  const Config config_;
  comm::World world_;
  bench::DirectGloo direct_;
  at::Tensor tensor_;
};

// ------------------------------------------------------------------------------------------------ two hosts

struct Host {
  pid_t pid = -1;
  int told = -1;  // reads what the host says
  int tell = -1;
};

void say(int to, char word) {
  if (write(to, &word, 1) != 1) throw std::runtime_error("a host has ended early");
}
bool hears(int from, char word) {
  char said = 0;
  return read(from, &said, 1) == 1 && said == word;
}

// Enters a network of its own, waits for the cable, and becomes the rank.
[[noreturn]] void be_host(int number, int tell, int told, const std::string& secret, char** arguments) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (unshare(CLONE_NEWNET) != 0) _exit(77);
  say(tell, 'n');
  if (!hears(told, 'c')) _exit(1);
  const std::string device = interface_of(number);
  if (!succeeds(fmt::format("ip link set lo up && ip address add {}/24 dev {} && ip link set {} up",
                            address_of(number), device, device)))
    _exit(1);
  const std::string rank = std::to_string(number), size = std::to_string(kHosts);
  const std::string master = address_of(0);
  for (const auto& [name, value] : {std::pair<const char*, const char*>{"RANK", rank.c_str()},
                                    {"WORLD_SIZE", size.c_str()},
                                    {"LOCAL_RANK", "0"},
                                    {"LOCAL_WORLD_SIZE", "1"},
                                    {"MASTER_ADDR", master.c_str()},
                                    {"MASTER_PORT", "29555"},
                                    {comm::kSecretVariable, secret.c_str()},
                                    {"OMP_NUM_THREADS", "1"},
                                    // As `penstock launch` sets them: freed memory stays with the process.
                                    {"MALLOC_MMAP_THRESHOLD_", "33554432"},
                                    {"MALLOC_TRIM_THRESHOLD_", "17179869184"},
                                    {"MIMALLOC_PURGE_DELAY", "-1"}})
    setenv(name, value, 1);
  execv("/proc/self/exe", arguments);
  _exit(127);
}

int start_hosts(char** arguments) {
  if (!succeeds("command -v ip")) throw std::runtime_error("ip is not installed (package iproute2)");
  std::signal(SIGPIPE, SIG_IGN);
  const std::string secret = comm::make_secret();
  std::array<Host, kHosts> hosts;
  for (int number = 0; number < kHosts; ++number) {
    int from_host[2], to_host[2];
    if (pipe2(from_host, O_CLOEXEC) != 0 || pipe2(to_host, O_CLOEXEC) != 0)
      throw std::runtime_error("no pipe");
    std::fflush(nullptr);
    Host& host = hosts[static_cast<std::size_t>(number)];
    host.pid = fork();
    if (host.pid < 0) throw std::runtime_error("no process");
    if (host.pid == 0) be_host(number, from_host[1], to_host[0], secret, arguments);
    close(from_host[1]);
    close(to_host[0]);
    host.told = from_host[0];
    host.tell = to_host[1];
  }
  for (const Host& host : hosts)
    if (!hears(host.told, 'n'))
      throw std::runtime_error("network namespaces are not allowed here: run it as root");
  if (!succeeds(fmt::format("ip link add {} netns {} type veth peer name {} netns {}", interface_of(0),
                            hosts[0].pid, interface_of(1), hosts[1].pid)))
    throw std::runtime_error("no virtual cable (veth) can be made here");
  for (const Host& host : hosts) say(host.tell, 'c');
  int worst = 0;
  for (const Host& host : hosts) {
    int status = 0;
    waitpid(host.pid, &status, 0);
    worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return worst;
}

int run(const Config& config, char** arguments) {
  if (std::getenv("RANK") == nullptr) return start_hosts(arguments);
  at::set_num_threads(1);
  Rank(config).run();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  CLI::App app("All-reduce between two hosts, through Penstock and through c10d", "two_hosts_bench");
  app.add_option("--megabytes", config.megabytes, "size of the tensor")->check(CLI::Range(1, 4096));
  app.add_option("--repeats", config.repeats, "all-reduces of each side")->check(CLI::PositiveNumber);
  app.add_option("--rates", config.rates, "rates of the cable, as tc takes them, separated by commas")
      ->delimiter(',');
  app.footer("Example:\n  two_hosts_bench --megabytes 8 --rates 100mbit,1gbit");
  CLI11_PARSE(app, argc, argv);
  int code = 1;
  try {
    code = run(config, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "two_hosts_bench: {}\n", error.what());
  }
  leave_process(code);
}
