
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "penstock/draw.h"
#include "penstock/plan/draw/drawing.h"
#include "penstock/schedule/check/dry_run.h"
#include "penstock/simulator.h"

namespace penstock::plan {

namespace {

using schedule::ActionKind;
using schedule::Slot;

// From the 256-colour palette of terminals: a background and a readable foreground. Later stages of a rank
// are lighter.
std::pair<int, int> terminal_colours(ActionKind kind, bool later) {
  switch (kind) {
    case ActionKind::Forward:
      return later ? std::pair{153, 16} : std::pair{25, 231};
    case ActionKind::Backward:
      return later ? std::pair{183, 16} : std::pair{97, 231};
    case ActionKind::BackwardInput:
      return later ? std::pair{159, 16} : std::pair{30, 231};
    case ActionKind::BackwardWeight:
      return later ? std::pair{193, 16} : std::pair{64, 231};
    case ActionKind::SendForward:
    case ActionKind::RecvForward:
    case ActionKind::SendBackward:
    case ActionKind::RecvBackward:
      return {252, 16};
    case ActionKind::Unshard:
    case ActionKind::Reshard:
      return {222, 16};
    case ActionKind::ReduceGrad:
      return {182, 16};
  }
  return {0, 0};
}

// Inserts idle slots for the steps in which a rank cannot act.
schedule::Schedule in_steps(const schedule::Schedule& schedule) {
  if (schedule.has_transfers()) return schedule::dry_run(schedule);
  // Every slot takes one step and its result is available in the next one.
  CostModel model;
  model.stages = {{.backward = 1}};
  model.overlap_saving = 1;
  const Simulation simulation = simulate(schedule, model);
  schedule::Schedule steps(schedule.stages());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const schedule::Row& row = schedule.row(rank);
    for (std::size_t slot = 0; slot < row.size(); ++slot) {
      if (row[slot].empty()) continue;
      const auto start =
          static_cast<std::size_t>(simulation.slots[static_cast<std::size_t>(rank)][slot].start + 0.5);
      if (start > steps.row(rank).size()) steps.row(rank).push_idle(start - steps.row(rank).size());
      steps.row(rank).push_slot(row[slot]);
    }
  }
  return steps;
}

}  // namespace

std::string draw_grid(const schedule::Schedule& schedule, const GridOptions& options) {
  const schedule::Schedule steps = in_steps(schedule);
  const std::vector<int> chunk = chunk_of_stages(schedule.stages());
  std::size_t columns = 0;
  for (const schedule::Row& row : steps.rows()) columns = std::max(columns, row.size());
  // Each column is as wide as its widest cell: an overlap or an UNSHARD must not widen all columns.
  std::vector<std::size_t> widths(columns, 1);
  for (const schedule::Row& row : steps.rows()) {
    for (std::size_t slot = 0; slot < row.size(); ++slot)
      widths[slot] = std::max(widths[slot], to_text(row[slot]).size());
  }
  const std::size_t label = fmt::format("rank {}", schedule.ranks() - 1).size();
  std::string text;
  const auto out = std::back_inserter(text);
  for (int rank = 0; rank < steps.ranks(); ++rank) {
    fmt::format_to(out, "{:<{}} |", fmt::format("rank {}", rank), label);
    const schedule::Row& row = steps.row(rank);
    for (std::size_t slot = 0; slot < row.size(); ++slot) {
      const Slot members = row[slot];
      const std::string cell = members.empty() ? "." : to_text(members);
      if (options.colour && !members.empty()) {
        const auto [background, foreground] =
            terminal_colours(members[0].kind(), chunk[static_cast<std::size_t>(members[0].stage())] > 0);
        fmt::format_to(out, " \x1b[48;5;{}m\x1b[38;5;{}m{:<{}}\x1b[0m", background, foreground, cell,
                       widths[slot]);
      } else if (slot + 1 == row.size()) {
        fmt::format_to(out, " {}", cell);  // no trailing blanks
      } else {
        fmt::format_to(out, " {:<{}}", cell, widths[slot]);
      }
    }
    text += '\n';
  }
  return text;
}

}  // namespace penstock::plan
