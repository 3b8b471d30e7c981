// Fuzz target of the schedule text parser and of what is done with its result.
//
// Any input either throws ConfigError or yields rows whose text parses to the same rows. Small schedules are
// also validated, lowered and executed; a schedule that passes validation must pass both.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "penstock/errors.h"
#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/schedule/check/dry_run.h"
#include "penstock/validate.h"

namespace {

using namespace penstock;
using namespace penstock::schedule;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz target: %s\n", what);
  std::abort();
}

void use(const Schedule& schedule) {
  if (!check(schedule).ok()) {
    try {
      (void)lower(schedule);
    } catch (const ValueError&) {
    }
    try {
      (void)dry_run(schedule);
    } catch (const ValueError&) {
    }
    return;
  }
  require(without_idle(dry_run(schedule)) == without_idle(schedule), "a valid schedule runs");
  if (!is_compute_only(schedule)) {
    bool refused = false;
    try {
      (void)lower(schedule);
    } catch (const ValueError&) {
      refused = true;
    }
    require(refused, "a lowered schedule cannot be lowered again");
    return;
  }
  require(check(lower(schedule)).ok(), "a valid schedule stays valid when it is lowered");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  TextLimits limits;
  limits.bytes = 1 << 16;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<Row> rows;
  try {
    rows = parse_rows(text, limits);
  } catch (const ConfigError&) {
    return 0;
  }
  require(parse_rows(to_csv(rows)) == rows, "text reads back as the same rows");
  for (const auto placement : {std::optional<StagePlacement>(), std::optional(StagePlacement::V),
                               std::optional(StagePlacement::Bidirectional)}) {
    try {
      use(schedule_from_rows(rows, placement));
    } catch (const ValueError&) {
      // not a schedule of that placement
    }
  }
  return 0;
}
