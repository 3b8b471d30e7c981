// Formats a validation report as text.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "penstock/base/describe.h"
#include "penstock/schedule/check/validate_parts.h"

namespace penstock::schedule {

namespace {

constexpr std::size_t kContext = 2;  // slots shown on both sides of a mark
constexpr std::size_t kRanksShown = 32;

std::string error_text(const Report& report) { return "schedule cannot be executed: " + report.text(); }

}  // namespace

std::string_view to_text(ViolationKind kind) {
  switch (kind) {
    case ViolationKind::Extent:
      return "extent";
    case ViolationKind::Malformed:
      return "malformed";
    case ViolationKind::WrongRank:
      return "wrong rank";
    case ViolationKind::Duplicate:
      return "duplicate";
    case ViolationKind::Order:
      return "order";
    case ViolationKind::Missing:
      return "missing";
    case ViolationKind::TransferOrder:
      return "transfer order";
    case ViolationKind::Sharding:
      return "sharding";
    case ViolationKind::Deadlock:
      return "deadlock";
  }
  PENSTOCK_INVARIANT(false, "every kind of violation has a text");
}

std::string place_text(const Schedule& schedule, const Place& place) {
  return fmt::format("rank {}, slot {} ({})", place.rank, place.slot,
                     to_text(schedule.row(place.rank)[place.slot]));
}

std::string marked_grid(const Schedule& schedule, const std::vector<Place>& waiting,
                        const std::vector<Place>& wanted) {
  std::map<int, std::map<std::size_t, char>> marks;  // rank -> slot -> mark
  for (const Place& place : wanted) marks[place.rank][place.slot] = '[';
  for (const Place& place : waiting) marks[place.rank][place.slot] = '>';
  std::string out;
  std::size_t shown = 0;
  for (const auto& [rank, places] : marks) {
    if (++shown > kRanksShown) {
      out += fmt::format("... and {} more ranks\n", marks.size() - kRanksShown);
      break;
    }
    const Row& row = schedule.row(rank);
    out += fmt::format("rank {:<4}|", rank);
    std::size_t printed_to = 0;  // slots before this one are printed or skipped
    for (const auto& mark : places) {
      const std::size_t from = std::max(printed_to, mark.first - std::min(mark.first, kContext));
      const std::size_t to = std::min(row.size(), mark.first + kContext + 1);
      if (from > printed_to) out += fmt::format(" ... {}:", from);
      for (std::size_t slot = from; slot < to; ++slot) {
        const auto found = places.find(slot);
        const std::string cell = row[slot].empty() ? "." : to_text(row[slot]);
        if (found == places.end()) {
          out += ' ' + cell;
        } else {
          out += fmt::format(" {}{}{}", found->second, cell, found->second == '>' ? '<' : ']');
        }
      }
      printed_to = std::max(printed_to, to);
    }
    if (printed_to < row.size()) out += " ...";
    out += '\n';
  }
  return out;
}

std::string Report::text() const {
  if (ok()) return "the schedule is valid";
  std::string out;
  for (const Violation& violation : violations) {
    out += fmt::format("{}{}: {}", out.empty() ? "" : "\n", to_text(violation.kind), violation.text);
  }
  if (!grid.empty()) out += "\n" + grid;
  return out;
}

ScheduleError::ScheduleError(Report report) : ValueError(error_text(report)), report_(std::move(report)) {}

}  // namespace penstock::schedule
