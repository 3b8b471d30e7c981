// What the harness changes in processes of the job, through a file that both map: the preloaded library
// (preload.cpp) reads it at each call.
#pragma once

#include <atomic>
#include <cstdint>

namespace penstock::chaos {

constexpr const char* kInjectedVariable = "PENSTOCK_CHAOS_INJECTED";  // the path of the file

struct Injected {
  std::atomic<std::int64_t> clock_jump_ns{0};   // added to the time of day
  std::atomic<std::int64_t> write_delay_us{0};  // before each write and flush of a regular file
  std::atomic<std::int64_t> strangers{0};       // connections that strangers have made
  std::atomic<std::int32_t> rank{-1};           // of which rank the clock jumps; -1: of all
};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

}  // namespace penstock::chaos
