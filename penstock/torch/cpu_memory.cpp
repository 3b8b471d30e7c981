#include "penstock/torch/cpu_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>

#include "penstock/torch/version.h"

namespace penstock {
namespace {

struct CpuCounts {
  std::atomic<std::int64_t> live = 0, peak = 0, allocations = 0;

  void add(std::int64_t bytes) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    const std::int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    for (std::int64_t highest = peak.load(std::memory_order_relaxed); highest < now && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed);) {
    }
  }
};
CpuCounts cpu_counts;

struct CountedMemory {
  at::DataPtr memory;
  std::int64_t bytes;
};

void free_counted(void* context) {
  const std::unique_ptr<CountedMemory> block(static_cast<CountedMemory*>(context));
  cpu_counts.live.fetch_sub(block->bytes, std::memory_order_relaxed);
}

class CountingAllocator final : public at::Allocator {
 public:
  explicit CountingAllocator(at::Allocator& below) : below_(&below) {}

#if PENSTOCK_TORCH_AT_LEAST(2, 4)
  at::DataPtr allocate(std::size_t bytes) override { return counted(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { below_->copy_data(to, from, bytes); }
#else
  at::DataPtr allocate(std::size_t bytes) const override { return counted(bytes); }
#endif

 private:
  at::DataPtr counted(std::size_t bytes) const {
    at::DataPtr memory = below_->allocate(bytes);
    if (bytes == 0) return memory;
    void* data = memory.get();
    const at::Device device = memory.device();
    auto block = std::make_unique<CountedMemory>(CountedMemory{std::move(memory), static_cast<std::int64_t>(bytes)});
    cpu_counts.add(block->bytes);
    return at::DataPtr(data, block.release(), &free_counted, device);
  }

  at::Allocator* below_;
};

}  // namespace

void count_cpu_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Kept for the life of the process, as its memory may be.
    c10::SetCPUAllocator(new CountingAllocator(*c10::GetCPUAllocator()), std::numeric_limits<std::uint8_t>::max());
  });
}

CpuMemory cpu_memory() { return {cpu_counts.live.load(std::memory_order_relaxed), cpu_counts.peak.load(std::memory_order_relaxed), cpu_counts.allocations.load(std::memory_order_relaxed)}; }

void reset_cpu_peak() { cpu_counts.peak.store(cpu_counts.live.load(std::memory_order_relaxed), std::memory_order_relaxed); }

}  // namespace penstock
