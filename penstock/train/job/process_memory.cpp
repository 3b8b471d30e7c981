#include "penstock/train/job/process_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace penstock::train {

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t whole = 0, resident = 0;
  if (!(file >> whole >> resident)) return 0;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::int64_t machine_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::int64_t memory = 0, swap = 0;
  std::string name, rest;
  for (std::int64_t kilobytes = 0; file >> name >> kilobytes; std::getline(file, rest)) {
    if (name == "MemTotal:") memory = kilobytes * 1024;
    if (name == "SwapTotal:") swap = kilobytes * 1024;
  }
  if (memory == 0) return 0;
  // Limits of a container: "max" is not a number, and cgroup version 1 uses a huge number for no limit.
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream limit(path);
    if (std::int64_t bytes = 0; limit >> bytes && bytes > 0) memory = std::min(memory, bytes);
  }
  return memory + swap;
}

}  // namespace penstock::train
