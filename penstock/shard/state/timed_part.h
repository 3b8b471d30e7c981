// Measures a part of ShardTimes.
#pragma once

#include <chrono>

#include "penstock/fully_shard.h"

namespace penstock {

// Adds the time until its destruction to a part; does nothing if `times` is null.
class TimedPart {
 public:
  TimedPart(ShardTimes* times, std::chrono::nanoseconds ShardTimes::*part)
      : part_(times ? &(times->*part) : nullptr), begin_(std::chrono::steady_clock::now()) {}
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
