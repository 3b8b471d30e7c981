// Where the time of sharding goes, on the threads that run the model: starting gathers and reductions and waiting for them, and copying
// between parameters or gradients and what is sent and received. Work that overlaps with compute does not show. On a device these are
// times of the host: copies and waits there are only enqueued.
#pragma once

#include <chrono>

namespace penstock {

struct ShardTimes {
  std::chrono::nanoseconds gather{}, reduce{}, copy{};
};

// Adds the time until its end to a part; to nothing where that is null.
class TimedPart {
 public:
  TimedPart(ShardTimes* times, std::chrono::nanoseconds ShardTimes::* part) : part_(times ? &(times->*part) : nullptr), begin_(std::chrono::steady_clock::now()) {}
  ~TimedPart() {
    if (part_) *part_ += std::chrono::steady_clock::now() - begin_;
  }
  TimedPart(const TimedPart&) = delete;
  TimedPart& operator=(const TimedPart&) = delete;

 private:
  std::chrono::nanoseconds* part_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace penstock
