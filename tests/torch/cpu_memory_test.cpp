// CPU memory counters.
#include "penstock/torch/compat/cpu_memory.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <thread>

namespace penstock {
namespace cpu_memory_test {

TEST(CpuMemory, LivePeakAndTheirReset) {
  const at::Tensor before = at::ones({1 << 16});
  EXPECT_EQ(cpu_memory().live, 0) << "counting has not started";
  count_cpu_memory();
  count_cpu_memory();
  const CpuMemory start = cpu_memory();
  EXPECT_EQ(start.live, 0) << "earlier allocations are not counted";
  {
    const at::Tensor one = at::empty({1000});
    EXPECT_EQ(cpu_memory().live - start.live, 4000);
    const at::Tensor view = one.view({10, 100}).t();
    EXPECT_EQ(cpu_memory().live - start.live, 4000) << "a view has no memory of its own";
    EXPECT_EQ(cpu_memory().allocations - start.allocations, 1);
    at::Tensor two = at::empty({500}, at::kDouble);
    EXPECT_EQ(cpu_memory().live - start.live, 8000);
    two.reset();
    EXPECT_EQ(cpu_memory().live - start.live, 4000);
    EXPECT_GE(cpu_memory().peak - start.live, 8000);
    reset_cpu_peak();
    EXPECT_EQ(cpu_memory().peak, cpu_memory().live);
  }
  EXPECT_EQ(cpu_memory().live, start.live);
  EXPECT_EQ(before.sum().item<float>(), 1 << 16);
}

// Kernels of other libraries allocate and free by address alone.
TEST(CpuMemory, AddressesAlone) {
  count_cpu_memory();
  const std::int64_t start = cpu_memory().live;
  at::Allocator* allocator = c10::GetCPUAllocator();
  void* memory = allocator->raw_allocate(1000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
  EXPECT_EQ(cpu_memory().live - start, 1000);
  allocator->raw_deallocate(memory);
  allocator->raw_deallocate(nullptr);
  EXPECT_EQ(cpu_memory().live, start);
}

TEST(CpuMemory, EmptyTensorsResizedOnesAndOtherThreads) {
  count_cpu_memory();
  const std::int64_t start = cpu_memory().live;
  const at::Tensor empty = at::empty({0});
  EXPECT_EQ(cpu_memory().live, start);
  at::Tensor grown = at::arange(10, at::kLong);
  grown.resize_({100});
  EXPECT_EQ(cpu_memory().live - start, 800);
  EXPECT_EQ(grown[9].item<std::int64_t>(), 9) << "values are kept";
  std::thread([freed = std::move(grown)]() mutable { freed.reset(); }).join();
  EXPECT_EQ(cpu_memory().live, start) << "freed elsewhere";
  // Temporaries of operators are included in the peak.
  const at::Tensor a = at::randn({64, 64});
  reset_cpu_peak();
  const std::int64_t before = cpu_memory().live;
  at::mm(a, a).add(1).sum();
  EXPECT_GE(cpu_memory().peak - before, 2 * 64 * 64 * 4);
  EXPECT_EQ(cpu_memory().live, before);
}

}  // namespace cpu_memory_test
}  // namespace penstock
