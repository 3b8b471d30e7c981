#include "tests/comm/allocation_counter.h"

#include <atomic>
#include <cstdlib>
#include <new>

// In a separate file: if these are visible, the compiler reports inlined pairs of them as mismatched.
namespace {
std::atomic<std::uint64_t> count = 0;
}

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++count;
  return std::malloc(size);
}
void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

std::uint64_t penstock::test::allocations() { return count; }
