// Counts the memory that tensors on the CPU hold.
//
//   count_cpu_memory();                       // early: what was made before is not counted
//   ...
//   cpu_memory().live                         // bytes now
//   reset_cpu_peak(); step(); cpu_memory().peak
//
// LibTorch has no such count for the CPU. From the call on its allocator is used through one that counts, for the rest of the process;
// that costs two atomic additions for each allocation. Memory that is not LibTorch's (files, containers) is not in it.
// Thread rule: any thread; the count is that of the process.
#pragma once

#include <cstdint>

namespace penstock {

// Again: nothing.
void count_cpu_memory();

struct CpuMemory {
  std::int64_t live = 0;         // bytes
  std::int64_t peak = 0;         // since the beginning or the last reset
  std::int64_t allocations = 0;  // how often memory was asked for
};
// Zeros before count_cpu_memory().
CpuMemory cpu_memory();
// The peak becomes what is live now.
void reset_cpu_peak();

}  // namespace penstock
