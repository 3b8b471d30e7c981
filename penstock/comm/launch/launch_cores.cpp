#include "penstock/comm/launch/launch_cores.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

namespace penstock::comm {

namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

double version2_limit(const std::string& folder) {
  return parse_cpu_max(read_text(folder + "/cpu.max")).value_or(kNoLimit);
}

double version1_limit(const std::string& folder) {
  // The same two numbers as in cpu.max, in two files; a negative number means no limit.
  const std::string quota = read_text(folder + "/cpu.cfs_quota_us");
  return parse_cpu_max(quota + " " + read_text(folder + "/cpu.cfs_period_us")).value_or(kNoLimit);
}

}  // namespace

int affinity_cores(pid_t process) {
  // The kernel rejects a mask smaller than its own with EINVAL, so large machines need a larger one.
  for (int cpus = 1024; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* mask = CPU_ALLOC(cpus);
    if (mask == nullptr) break;
    const std::size_t size = CPU_ALLOC_SIZE(cpus);
    CPU_ZERO_S(size, mask);
    const int failed = sched_getaffinity(process, size, mask);
    const int error = errno;
    const int count = failed == 0 ? CPU_COUNT_S(size, mask) : 0;
    CPU_FREE(mask);
    if (count > 0) return count;
    if (error != EINVAL) break;
  }
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

std::optional<double> parse_cpu_max(std::string_view text) {
  std::istringstream in{std::string(text)};
  double quota = 0, period = 0;
  if (!(in >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

std::optional<double> cgroup_cores(const std::string& proc_cgroup, const std::string& mount) {
  double limit = kNoLimit;
  std::istringstream lines(proc_cgroup);
  for (std::string line; std::getline(lines, line);) {
    // "0::/path" is version 2; "4:cpu,cpuacct:/path" is version 1.
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",cpu,") == std::string::npos) continue;
    // A limit of any parent applies too. Inside a container the own path may not be mounted, but its root is.
    std::string path = line.substr(second + 1);
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      limit =
          std::min(limit, version2 ? version2_limit(mount + path) : version1_limit(mount + "/cpu" + path));
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limit == kNoLimit ? std::nullopt : std::optional<double>(limit);
}

int available_cores() {
  const int affinity = affinity_cores(0);
  const auto limit = cgroup_cores(read_text("/proc/self/cgroup"), "/sys/fs/cgroup");
  if (!limit || *limit >= affinity) return affinity;
  return std::max(1, static_cast<int>(std::floor(*limit)));
}

int threads_per_rank(int cores, int ranks) { return std::max(1, cores / std::max(1, ranks)); }

}  // namespace penstock::comm
