// The flags that the commands about schedules share.
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
// The same with --kind and --group-size.
void add_shape_flags(CLI::App& command, ShapeFlags& flags);
void add_cost_flags(CLI::App& command, CostFlags& flags);
// Limits on memory, for `auto` and for comparison.
void add_limit_flags(CLI::App& command, CostFlags& flags);

plan::CostModel cost_model(const CostFlags& flags);
// "4", "4:3:2:1", or "1f1b": what 1F1B holds on each rank.
std::vector<plan::MemoryLimit> memory_limits(const CostFlags& flags, int ranks, int microbatches);

bool is_auto(const ShapeFlags& flags);
// Throws ConfigError where a limit on memory is given for anything but `auto`, the only kind that works for one.
void require_auto_for_limits(const CLI::App& command, const ShapeFlags& flags);
// Throws ConfigError for what is missing or illegal.
schedule::PipelineShape shape_of(const ShapeFlags& flags);
// Of a fixed kind or of `auto`.
schedule::Schedule schedule_of(const ShapeFlags& flags, const CostFlags& costs);

// One of the names, any case; else a ConfigError with the nearest one.
std::string one_of(std::string_view flag, std::string_view value, const std::vector<std::string>& names);

// Whole file, or standard input for "-". Throws ConfigError when it cannot be read.
std::string read_text(const std::string& path);
// To the file, or to standard output where the path is empty or "-". Throws ConfigError when it cannot be
// written.
void write_text(const std::string& path, std::string_view text);

}  // namespace penstock::cli
