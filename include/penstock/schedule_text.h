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
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::schedule {

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
