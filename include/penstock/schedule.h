// A pipeline schedule as a value: for every rank a row of slots, each slot idle, one action, or an overlap of
// several.
//
// The same value is generated, validated, lowered, simulated, drawn, written as text and executed. It says in
// which order a rank acts; it says nothing of durations. Idle slots align the drawing of a schedule and never
// change its meaning.
#pragma once

#include <cstddef>
#include <iterator>
#include <span>
#include <vector>

#include "penstock/action.h"
#include "penstock/stage_placement.h"

namespace penstock::schedule {

// What one slot holds: empty = idle, one action, or two and more that are executed as one overlapped unit.
// Valid until the row changes.
using Slot = std::span<const Action>;

// One rank's slots in the order of execution. 8 bytes a slot; overlaps lie in a side table.
class Row {
 public:
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Slot;
    using difference_type = std::ptrdiff_t;
    using pointer = void;
    using reference = Slot;
    Iterator(const Row* row, std::size_t index) : row_(row), index_(index) {}
    Slot operator*() const { return (*row_)[index_]; }
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    Iterator operator++(int) {
      Iterator old = *this;
      ++index_;
      return old;
    }
    friend bool operator==(const Iterator&, const Iterator&) = default;

   private:
    const Row* row_;
    std::size_t index_;
  };

  std::size_t size() const { return cells_.size(); }
  bool empty() const { return cells_.empty(); }
  Slot operator[](std::size_t slot) const {
    const Action& cell = cells_[slot];
    if ((cell.head_ & (Action::kIdleTag | Action::kOverlapTag)) == 0) [[likely]]
      return {&cell, 1};
    if ((cell.head_ & Action::kIdleTag) != 0) return {};
    return {overlapped_.data() + cell.tail_, static_cast<std::size_t>(cell.head_ >> 8)};
  }
  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, size()}; }

  void reserve(std::size_t slots) { cells_.reserve(slots); }
  void push(const Action& action) { cells_.push_back(action); }
  void push_idle(std::size_t slots = 1);
  // Idle, one action or an overlap, as the slot says. The slot must not point into this row's own storage.
  void push_slot(Slot slot) {
    if (slot.size() == 1) [[likely]] {
      cells_.push_back(slot[0]);
    } else {
      push_idle_or_overlap(slot);
    }
  }
  // Swaps the contents of one slot for another; used by tests and by schedule search.
  void replace(std::size_t slot, const Action& action) { cells_[slot] = action; }
  void replace_idle(std::size_t slot) { cells_[slot] = Action(Action::kIdleTag, 0); }
  void swap_slots(std::size_t a, std::size_t b) { std::swap(cells_[a], cells_[b]); }

  std::size_t idle_slots() const;
  // Actions of all slots, the members of overlaps counted one by one.
  std::size_t actions() const;

  friend bool operator==(const Row& a, const Row& b);

 private:
  void push_idle_or_overlap(Slot slot);

  std::vector<Action> cells_;
  std::vector<Action> overlapped_;
};

class Schedule {
 public:
  // Rows start empty.
  explicit Schedule(StageMap stages);
  // Throws ValueError unless there is one row per rank.
  Schedule(StageMap stages, std::vector<Row> rows);

  const StageMap& stages() const { return stages_; }
  int ranks() const { return stages_.ranks(); }
  int microbatches() const { return stages_.microbatches(); }

  Row& row(int rank) { return rows_[static_cast<std::size_t>(rank)]; }
  const Row& row(int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  const std::vector<Row>& rows() const { return rows_; }

  // True when a send or a receive occurs, that is when the schedule says itself what is communicated.
  bool has_transfers() const;
  // Actions of all ranks.
  std::size_t actions() const;

  friend bool operator==(const Schedule&, const Schedule&) = default;

 private:
  StageMap stages_;
  std::vector<Row> rows_;
};

// The same rows without idle slots.
Schedule without_idle(const Schedule& schedule);
// The same rows without idle slots and without UNSHARD, RESHARD and REDUCE_GRAD.
Schedule without_sharding(const Schedule& schedule);

}  // namespace penstock::schedule
