#include "penstock/schedule.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::schedule {

namespace {

template <class Keep>
Schedule filtered(const Schedule& schedule, Keep keep) {
  Schedule result(schedule.stages());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    Row& row = result.row(rank);
    row.reserve(schedule.row(rank).size());
    for (const Slot slot : schedule.row(rank)) {
      if (!slot.empty() && keep(slot)) row.push_slot(slot);
    }
  }
  return result;
}

}  // namespace

void Row::push_idle(std::size_t slots) { cells_.insert(cells_.end(), slots, Action(Action::kIdleTag, 0)); }

void Row::push_idle_or_overlap(Slot slot) {
  if (slot.empty()) {
    push_idle();
    return;
  }
  PENSTOCK_INVARIANT(overlapped_.size() + slot.size() < UINT32_MAX && slot.size() < (1u << 24),
                     "the position of an overlap fits in its cell");
  cells_.push_back(Action(Action::kOverlapTag | static_cast<std::uint32_t>(slot.size()) << 8,
                          static_cast<std::uint32_t>(overlapped_.size())));
  overlapped_.insert(overlapped_.end(), slot.begin(), slot.end());
}

std::size_t Row::idle_slots() const {
  return static_cast<std::size_t>(std::count_if(
      cells_.begin(), cells_.end(), [](const Action& cell) { return (cell.head_ & Action::kIdleTag) != 0; }));
}

std::size_t Row::actions() const {
  std::size_t count = 0;
  for (const Slot slot : *this) count += slot.size();
  return count;
}

bool operator==(const Row& a, const Row& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::ranges::equal(a[i], b[i])) return false;
  }
  return true;
}

Schedule::Schedule(StageMap stages)
    : stages_(std::move(stages)), rows_(static_cast<std::size_t>(stages_.ranks())) {}

Schedule::Schedule(StageMap stages, std::vector<Row> rows)
    : stages_(std::move(stages)), rows_(std::move(rows)) {
  if (rows_.size() != static_cast<std::size_t>(stages_.ranks())) {
    throw ValueError(describe("rows of a schedule", fmt::format("{}", rows_.size()),
                              fmt::format("{}, one per rank", stages_.ranks())));
  }
}

bool Schedule::has_transfers() const {
  for (const Row& row : rows_) {
    for (const Slot slot : row) {
      for (const Action& action : slot) {
        if (is_send(action.kind()) || is_receive(action.kind())) return true;
      }
    }
  }
  return false;
}

std::size_t Schedule::actions() const {
  std::size_t count = 0;
  for (const Row& row : rows_) count += row.actions();
  return count;
}

Schedule without_idle(const Schedule& schedule) {
  return filtered(schedule, [](Slot) { return true; });
}

Schedule without_sharding(const Schedule& schedule) {
  return filtered(schedule, [](Slot slot) { return !is_stage_wide(slot[0].kind()); });
}

}  // namespace penstock::schedule
