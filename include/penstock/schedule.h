// A pipeline schedule as a value: for every rank a row of slots; each slot is idle, one action, or an overlap
// of several.
//
//   schedule::StageMap stages(2, {0, 1}, 1);  // 2 ranks with one stage each, 1 microbatch
//   schedule::Schedule tiny(stages);
//   for (int rank = 0; rank < 2; ++rank) {
//     tiny.row(rank).push(schedule::forward(rank, 0));
//     tiny.row(rank).push(schedule::backward(rank, 0));
//   }
//   schedule::validate(tiny);
//
// The same value is generated (generators.h), validated, lowered, simulated, drawn, written as text and
// executed. It defines the order in which each rank acts, not durations. Idle slots align drawings and do not
// change the meaning. A schedule is compute-only (F, B, I, W) or lowered (with transfers, parameter gathering
// and gradient reduction; see lower.h).
//
// Thread safety: values; concurrent reads are safe, writes need exclusive access.
#pragma once

#include <cstddef>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/action.h"
#include "penstock/stage_placement.h"

namespace penstock::schedule {

// The contents of a slot: empty if idle, one action, or two or more that are executed as one overlapped unit.
// A view, valid until the row changes.
using Slot = std::span<const Action>;

// The slots of one rank in the order of execution. A slot takes 8 bytes; the members of overlaps are in a
// side table.
class Row {
 public:
  // Iterates over the slots of a row. Valid until the row changes.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;  // dereferencing returns a value
    using value_type = Slot;                            // a view of one slot
    using difference_type = std::ptrdiff_t;             // for std::iterator_traits
    using pointer = void;                               // there is no operator->
    using reference = Slot;                             // returned by value
    // Points to a slot of `row`, or to its end.
    Iterator(const Row* row, std::size_t index) : row_(row), index_(index) {}
    // Returns the slot.
    Slot operator*() const { return (*row_)[index_]; }
    // Advances to the next slot.
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    // Advances to the next slot and returns the previous position.
    Iterator operator++(int) {
      Iterator old = *this;
      ++index_;
      return old;
    }
    // True if both point to the same slot of the same row.
    friend bool operator==(const Iterator&, const Iterator&) = default;

   private:
    const Row* row_;
    std::size_t index_;
  };

  // Number of slots, idle ones included.
  std::size_t size() const { return cells_.size(); }
  // Whether there are no slots.
  bool empty() const { return cells_.empty(); }
  // Returns a slot. `slot` must be below size(); it is not checked.
  Slot operator[](std::size_t slot) const {
    const Action& cell = cells_[slot];
    if ((cell.head_ & (Action::kIdleTag | Action::kOverlapTag)) == 0) [[likely]]
      return {&cell, 1};
    if ((cell.head_ & Action::kIdleTag) != 0) return {};
    return {overlapped_.data() + cell.tail_, static_cast<std::size_t>(cell.head_ >> 8)};
  }
  // Iterator to the first slot.
  Iterator begin() const { return {this, 0}; }
  // Iterator past the last slot.
  Iterator end() const { return {this, size()}; }

  // Allocates memory for this many slots.
  void reserve(std::size_t slots) { cells_.reserve(slots); }
  // Appends a slot with one action.
  void push(const Action& action) { cells_.push_back(action); }
  // Appends idle slots.
  void push_idle(std::size_t slots = 1);
  // Appends a copy of a slot: idle, one action or an overlap. It must not be a slot of this row.
  void push_slot(Slot slot) {
    if (slot.size() == 1) [[likely]] {
      cells_.push_back(slot[0]);
    } else {
      push_idle_or_overlap(slot);
    }
  }
  // Replaces the contents of a slot by one action. `slot` must be below size().
  void replace(std::size_t slot, const Action& action) { cells_[slot] = action; }
  // Makes a slot idle. `slot` must be below size().
  void replace_idle(std::size_t slot) { cells_[slot] = Action(Action::kIdleTag, 0); }
  // Exchanges two slots. Both must be below size().
  void swap_slots(std::size_t a, std::size_t b) { std::swap(cells_[a], cells_[b]); }

  // Returns the number of idle slots.
  std::size_t idle_slots() const;
  // Returns the number of actions of all slots; each member of an overlap counts.
  std::size_t actions() const;

  // True if all slots have the same contents, idle slots included.
  friend bool operator==(const Row& a, const Row& b);

 private:
  void push_idle_or_overlap(Slot slot);

  std::vector<Action> cells_;
  std::vector<Action> overlapped_;
};

// The rows of all ranks and the map from stages to ranks.
class Schedule {
 public:
  // Creates a schedule with empty rows.
  explicit Schedule(StageMap stages);
  // Creates a schedule from rows. Throws ValueError unless there is one row per rank.
  Schedule(StageMap stages, std::vector<Row> rows);

  // Stages, ranks and microbatches.
  const StageMap& stages() const { return stages_; }
  // Number of ranks.
  int ranks() const { return stages_.ranks(); }
  // Number of microbatches, of all chains together.
  int microbatches() const { return stages_.microbatches(); }

  // The row of a rank, which must be in [0, ranks()); it is not checked.
  Row& row(int rank) { return rows_[static_cast<std::size_t>(rank)]; }
  // The row of a rank, which must be in [0, ranks()); it is not checked.
  const Row& row(int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  // All rows, by rank.
  const std::vector<Row>& rows() const { return rows_; }

  // Returns whether a send or a receive occurs, as in a lowered schedule.
  bool has_transfers() const;
  // Returns the number of actions of all ranks.
  std::size_t actions() const;

  // Compares the maps and all rows.
  friend bool operator==(const Schedule&, const Schedule&) = default;

 private:
  StageMap stages_;
  std::vector<Row> rows_;
};

// Returns the schedule without idle slots.
Schedule without_idle(const Schedule& schedule);
// Returns the schedule without idle slots and without UNSHARD, RESHARD and REDUCE_GRAD.
Schedule without_sharding(const Schedule& schedule);

// ---- text form ----
//
// The text form of schedules: CSV with a line per rank and a cell per slot; an empty cell is an idle slot.
//
//   schedule::Schedule tiny = schedule::parse_schedule("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n");
//   std::cout << schedule::to_csv(tiny);
//
// Parsing inverts writing. Parsing is strict: a cell must match as a whole. Accepted are blanks around a cell
// and around the members of an overlap, and leading zeros, nothing else. Rows may have different lengths. An
// empty line is a rank without slots, a line of blanks a rank with one idle slot; the last line need not end
// with a newline. A '#' starts a comment up to the end of its line; a line that has only a comment is not a
// rank. A byte order mark at the beginning is skipped.
//
// Malformed text throws ConfigError; the message names line and column, counted from 1.
//
// Thread safety: pure functions; they may be called from any number of threads.

// Maxima that the parser accepts, so that a hostile file cannot exhaust memory. Text beyond them is a
// ConfigError.
struct TextLimits {
  std::size_t bytes = std::size_t{1} << 31;           // size of the text
  std::size_t ranks = 65536;                          // number of rows
  std::size_t slots_per_rank = std::size_t{1} << 26;  // number of cells of a row
  std::size_t overlap_members = 64;                   // number of actions of a cell
  std::int32_t stage = kMaxStage;                     // greatest stage; at most kMaxStage
  std::int32_t microbatch = kMaxMicrobatch;           // greatest microbatch; at most kMaxMicrobatch
};

// Returns the actions of one cell: none (idle), one, or the members of an overlap. Throws ConfigError for
// malformed text.
std::vector<Action> parse_cell(std::string_view text, const TextLimits& limits = {});
// Returns the action of a cell. Throws ConfigError for malformed text and for a cell that is not exactly one
// action.
Action parse_action(std::string_view text, const TextLimits& limits = {});

// Returns the rows of a text, one per line. Throws ConfigError for malformed text.
std::vector<Row> parse_rows(std::string_view csv, const TextLimits& limits = {});
// Returns the text form of rows.
std::string to_csv(const std::vector<Row>& rows);
// Returns the text form of the rows of a schedule. The stage map is not part of the text.
std::string to_csv(const Schedule& schedule);

// Reads a whole schedule. The numbers of stages and microbatches are one more than the greatest that occur.
// Without a placement, each stage belongs to the first rank that has an action of it, and there is one chain;
// with a placement, the map is that of the placement, and `validate` reports actions on other ranks. Throws
// ConfigError for malformed text, for text without actions, for a greatest stage that is not below the number
// of actions, and without a placement if a stage never occurs; ValueError for a placement that does not allow
// these numbers.
Schedule parse_schedule(std::string_view csv, std::optional<StagePlacement> placement = std::nullopt,
                        const TextLimits& limits = {});
// The same for rows that are already parsed.
Schedule schedule_from_rows(std::vector<Row> rows, std::optional<StagePlacement> placement = std::nullopt);

}  // namespace penstock::schedule
