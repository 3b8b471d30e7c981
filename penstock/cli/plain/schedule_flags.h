// Flags shared by the schedule commands.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>

#include "penstock/auto_schedule.h"
#include "penstock/cost_model.h"
#include "penstock/generators.h"

namespace penstock::cli {

struct ShapeFlags {
  std::string kind;
  int ranks = 0;
  int stages_per_rank = 0;  // 0: not given
  int microbatches = 0;
  int group_size = 0;  // 0: not given
};

struct CostFlags {
  std::string cost;
  std::string memory;
  std::string communication = "overlapped";
  std::string max_activations;
  std::string max_bytes;
};

// --ranks, --stages-per-rank, --microbatches
void add_size_flags(CLI::App& command, ShapeFlags& flags, const std::string& stages_help);
// The same, and --kind and --group-size.
void add_shape_flags(CLI::App& command, ShapeFlags& flags);
void add_cost_flags(CLI::App& command, CostFlags& flags);
// Memory limits, for `auto` and for comparison.
void add_limit_flags(CLI::App& command, CostFlags& flags);

plan::CostModel cost_model(const CostFlags& flags);
// "4", "4:3:2:1", or "1f1b": what 1F1B keeps on each rank.
std::vector<plan::MemoryLimit> memory_limits(const CostFlags& flags, int ranks, int microbatches);

bool is_auto(const ShapeFlags& flags);
// Throws ConfigError if a memory limit is given for any kind but `auto`, the only kind that uses it.
void require_auto_for_limits(const CLI::App& command, const ShapeFlags& flags);
// Throws ConfigError for missing or invalid flags.
schedule::PipelineShape shape_of(const ShapeFlags& flags);
// The schedule of a fixed kind or of `auto`.
schedule::Schedule schedule_of(const ShapeFlags& flags, const CostFlags& costs);

// Returns the matching name, ignoring case. Throws ConfigError with the nearest name otherwise.
std::string one_of(std::string_view flag, std::string_view value, const std::vector<std::string>& names);

// Reads a whole file, or standard input for "-". Throws ConfigError on failure.
std::string read_text(const std::string& path);
// Writes to the file, or to standard output if the path is empty or "-". Throws ConfigError on failure.
void write_text(const std::string& path, std::string_view text);

}  // namespace penstock::cli
