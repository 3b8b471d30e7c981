// The time sharding takes on the threads that run the model: starting gathers and reductions and waiting for
// them, and copying between parameters or gradients and communication buffers. Work that overlaps with
// compute is not included. On a device these are host times: copies and waits are only enqueued.
#pragma once

#include <chrono>

namespace penstock {

struct ShardTimes {
  std::chrono::nanoseconds gather{}, reduce{}, copy{};
};

// Adds the time until its destruction to a part; does nothing if that is null.
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
