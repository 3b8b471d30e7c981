// Counts the allocations of a test program that compiles allocation_counter.cpp in.
#pragma once

#include <cstdint>

namespace penstock::test {

// Calls of operator new since the program began, from all threads.
std::uint64_t allocations();

}  // namespace penstock::test
