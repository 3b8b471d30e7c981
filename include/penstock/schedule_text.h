// The text form of schedules: CSV, one line a rank, one cell a slot, an empty cell for an idle slot.
//
// Writing and reading are inverse to each other. Reading is strict: a cell must match as a whole; blanks
// around a cell, around the members of an overlap and leading zeros are accepted, nothing else. Every error
// is a ConfigError that names line and column (from 1). Rows may have different lengths. An empty line is a
// rank without slots, a line of blanks a rank with one idle slot; the line end of the last row may be
// missing. A '#' begins a comment up to the end of its line, a line of nothing but a comment is no rank, and a
// byte order mark at the beginning is skipped.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule.h"

namespace penstock::schedule {

// What the reader accepts at most; a file beyond is refused before memory is spent on it.
struct TextLimits {
  std::size_t bytes = std::size_t{1} << 31;
  std::size_t ranks = 65536;
  std::size_t slots_per_rank = std::size_t{1} << 26;
  std::size_t overlap_members = 64;
  std::int32_t stage = kMaxStage;
  std::int32_t microbatch = kMaxMicrobatch;
};

// The actions of one cell: none (idle), one, or the members of an overlap.
std::vector<Action> parse_cell(std::string_view text, const TextLimits& limits = {});
// Exactly one action.
Action parse_action(std::string_view text, const TextLimits& limits = {});

std::vector<Row> parse_rows(std::string_view csv, const TextLimits& limits = {});
std::string to_csv(const std::vector<Row>& rows);
std::string to_csv(const Schedule& schedule);

// Reads a whole schedule. The number of stages and microbatches is one more than the greatest that occurs.
// Without a placement each stage belongs to the rank that first acts on it; with one, the map is the
// placement's, and `validate` reports the actions that stand on another rank. Throws ConfigError when a stage
// below the greatest never occurs and no placement tells where it belongs.
Schedule parse_schedule(std::string_view csv, std::optional<StagePlacement> placement = std::nullopt,
                        const TextLimits& limits = {});
// The same from rows.
Schedule schedule_from_rows(std::vector<Row> rows, std::optional<StagePlacement> placement = std::nullopt);

}  // namespace penstock::schedule
