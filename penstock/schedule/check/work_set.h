// A set of (stage, microbatch) pairs as a bitmap: "which forwards have run".
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::schedule {

class WorkSet {
 public:
  explicit WorkSet(const StageMap& stages)
      : microbatches_(static_cast<std::size_t>(stages.microbatches())),
        bits_((static_cast<std::size_t>(stages.stages()) * microbatches_ + 63) / 64, 0) {}

  bool contains(std::int32_t stage, std::int32_t microbatch) const {
    const std::size_t i = index(stage, microbatch);
    return (bits_[i / 64] >> (i % 64) & 1) != 0;
  }
  // Returns true if the pair was not in the set before.
  bool insert(std::int32_t stage, std::int32_t microbatch) {
    const std::size_t i = index(stage, microbatch);
    const std::uint64_t bit = std::uint64_t{1} << (i % 64);
    const bool fresh = (bits_[i / 64] & bit) == 0;
    bits_[i / 64] |= bit;
    return fresh;
  }

 private:
  std::size_t index(std::int32_t stage, std::int32_t microbatch) const {
    return static_cast<std::size_t>(stage) * microbatches_ + static_cast<std::size_t>(microbatch);
  }

  std::size_t microbatches_;
  std::vector<std::uint64_t> bits_;
};

// A bitmap needs stages x microbatches bits. A schedule that is nearly complete has more actions than that,
// so a schedule whose numbers imply far more work than it has actions is refused before memory is allocated:
// throws ScheduleError.
void check_density(const Schedule& schedule);
// Throws ScheduleError for an action whose stage or microbatch is outside the schedule, or one that lacks a
// required microbatch. After this check every action can be looked up in a WorkSet.
void check_numbers(const Schedule& schedule);

}  // namespace penstock::schedule
