// Counts the memory held by CPU tensors.
//
//   count_cpu_memory();                       // call early: existing allocations are not counted
//   ...
//   cpu_memory().live                         // bytes now
//   reset_cpu_peak(); step(); cpu_memory().peak
//
// LibTorch does not count CPU memory. This call wraps its CPU allocator for the rest of the process, at the
// cost of two atomic additions per allocation. Memory not allocated by LibTorch (files, containers) is not
// counted.
// Thread safety: any thread. The counts are per process.
#pragma once

#include <cstdint>

namespace penstock {

// Calling it again has no effect.
void count_cpu_memory();

struct CpuMemory {
  std::int64_t live = 0;         // bytes
  std::int64_t peak = 0;         // since counting started or the last reset
  std::int64_t allocations = 0;  // number of allocations
};
// All zeros before count_cpu_memory().
CpuMemory cpu_memory();
// Sets the peak to the current live bytes.
void reset_cpu_peak();

}  // namespace penstock
