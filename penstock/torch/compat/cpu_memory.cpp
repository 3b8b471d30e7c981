#include "penstock/torch/compat/cpu_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <mutex>

#include "penstock/torch/compat/version.h"

namespace penstock {
namespace {

struct CpuCounts {
  std::atomic<std::int64_t> live = 0, peak = 0, allocations = 0;

  void add(std::int64_t bytes) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    const std::int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    for (std::int64_t highest = peak.load(std::memory_order_relaxed);
         highest < now && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed);) {
    }
  }
};
CpuCounts cpu_counts;

// The size is stored in front of the block, because some kernels free memory by its address alone
// (raw_deallocate).
constexpr std::size_t kFront = 64;  // keeps the alignment of the allocator below
at::Allocator* below = nullptr;

struct Front {
  std::uint64_t mark;  // distinguishes our blocks from those allocated before counting started
  std::int64_t bytes;
};
constexpr std::uint64_t kMark = 0x5e7a1c93d24b860f;

void free_counted(void* memory) {
  if (memory == nullptr) return;
  auto* front = reinterpret_cast<Front*>(static_cast<std::byte*>(memory) - kFront);
  if (front->mark != kMark) return below->raw_deallocate(memory);
  front->mark = 0;
  cpu_counts.live.fetch_sub(front->bytes, std::memory_order_relaxed);
  below->raw_deallocate(front);
}

class CountingAllocator final : public at::Allocator {
 public:
#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  at::DataPtr allocate(std::size_t bytes) override { return counted(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    below->copy_data(to, from, bytes);
  }
#else
  at::DataPtr allocate(std::size_t bytes) const override { return counted(bytes); }
#endif
  at::DeleterFnPtr raw_deleter() const override { return &free_counted; }

 private:
  static at::DataPtr counted(std::size_t bytes) {
    if (bytes == 0) return {nullptr, nullptr, &free_counted, at::kCPU};
    void* front = below->raw_allocate(bytes + kFront);
    *static_cast<Front*>(front) = {kMark, static_cast<std::int64_t>(bytes)};
    cpu_counts.add(static_cast<std::int64_t>(bytes));
    void* memory = static_cast<std::byte*>(front) + kFront;
    return {memory, memory, &free_counted, at::kCPU};
  }
};

}  // namespace

void count_cpu_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    below = c10::GetCPUAllocator();
    // Never freed: its blocks may live until the process ends.
    c10::SetCPUAllocator(new CountingAllocator, std::numeric_limits<std::uint8_t>::max());
  });
}

CpuMemory cpu_memory() {
  return {cpu_counts.live.load(std::memory_order_relaxed), cpu_counts.peak.load(std::memory_order_relaxed),
          cpu_counts.allocations.load(std::memory_order_relaxed)};
}

void reset_cpu_peak() {
  cpu_counts.peak.store(cpu_counts.live.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

}  // namespace penstock
