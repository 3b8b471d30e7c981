// The number of cores this process may use: the smallest of its affinity mask and the limits of its control
// groups. The machine's own count would give every container as many threads as its host has cores.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace penstock::comm {

// At least 1. A fractional limit is rounded down, because one thread too many is throttled with all the
// others.
int available_cores();

// Returns the number of cores in the affinity mask of a process (0: this one), or all of the machine's if the
// mask cannot be read.
int affinity_cores(pid_t process);

// Threads that each of `ranks` ranks should use: an equal share of `cores`, at least 1.
int threads_per_rank(int cores, int ranks);

// Cores granted by a cpu.max file ("150000 100000" is 1.5; "max 100000" is no limit). Returns std::nullopt
// for no limit or malformed text.
std::optional<double> parse_cpu_max(std::string_view text);

// Returns the smallest limit of a control group and its parents, given the text of /proc/self/cgroup and the
// mount point of the hierarchies (version 2, and version 1's cpu controller).
std::optional<double> cgroup_cores(const std::string& proc_cgroup, const std::string& mount);

}  // namespace penstock::comm
