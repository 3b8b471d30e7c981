#include "penstock/train/config/configured_schedule.h"

#include <fmt/format.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/generators.h"

namespace penstock::train {
namespace {

bool is_file(const std::string& schedule) {
  return schedule.find('/') != std::string::npos || schedule.ends_with(".csv");
}

schedule::Schedule schedule_from_file(const LayoutConfig& config) {
  std::ifstream file(config.schedule);
  std::stringstream text;
  text << file.rdbuf();
  if (!file)
    throw ConfigError(describe("layout.schedule", config.schedule,
                               "a file that can be read, or the name of a schedule",
                               "penstock schedule --help lists the names"));
  schedule::Schedule read = schedule::parse_schedule(text.str());
  const auto expect = [&](const char* field, std::int64_t found, std::int64_t wanted) {
    if (found != wanted)
      throw ConfigError(describe(fmt::format("{} of the schedule in {}", field, config.schedule),
                                 std::to_string(found), std::to_string(wanted),
                                 fmt::format("set layout.{} to {}", field, found)));
  };
  expect("pp", read.ranks(), config.pp);
  expect("virtual_stages", read.stages().stages() / read.ranks(), config.virtual_stages);
  expect("microbatches", read.microbatches(), config.microbatches);
  return read;
}

}  // namespace

bool has_weight_backwards(const schedule::Schedule& schedule) {
  for (const schedule::Row& row : schedule.rows())
    for (const schedule::Slot slot : row)
      for (const schedule::Action& action : slot)
        if (action.kind() == schedule::ActionKind::BackwardWeight) return true;
  return false;
}

schedule::Schedule configured_schedule(const LayoutConfig& config) {
  if (is_file(config.schedule)) return schedule_from_file(config);
  return schedule::generate(schedule::schedule_kind(config.schedule),
                            {.ranks = static_cast<int>(config.pp),
                             .stages_per_rank = static_cast<int>(config.virtual_stages),
                             .microbatches = static_cast<int>(config.microbatches),
                             .group_size = {}});
}

}  // namespace penstock::train
