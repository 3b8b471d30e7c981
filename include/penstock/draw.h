// Draws schedules: as a table of text, a picture, an interactive page, or a trace.
//
//   schedule::Schedule schedule =
//       schedule::generate(schedule::ScheduleKind::OneFOneB, {.ranks = 4, .microbatches = 8});
//   std::cout << plan::draw_grid(schedule);
//   plan::Simulation simulation = plan::simulate(schedule, plan::CostModel{});
//   std::ofstream("schedule.svg") << plan::draw_svg({schedule, simulation, "1F1B"});
//
// Every function returns the whole text and writes no file. draw_grid ignores costs and shows the order
// alone; the others show the times of a simulation.
//
// Thread safety: pure functions; they may be called from any number of threads.
#pragma once

#include <string>

#include "penstock/schedule.h"
#include "penstock/simulator.h"

namespace penstock::plan {

// A schedule and its simulation under some cost model. Refers to both; they must outlive it.
struct Drawing {
  const schedule::Schedule& schedule;  // compute-only or lowered
  const Simulation& simulation;        // of this schedule
  std::string title;                   // "1F1B"
};

// Options of draw_grid.
struct GridOptions {
  bool colour = false;  // terminal escape sequences: the background color shows the kind of action
};

// Returns a table of text: a row per rank, a column per step. In every step each rank executes one slot,
// whatever its cost, if what it needs happened in an earlier step; a dot is a step without work. In a lowered
// schedule both slots of a transfer may share a step. Throws ScheduleError for a schedule whose ranks wait
// for each other.
std::string draw_grid(const schedule::Schedule& schedule, const GridOptions& options = {});

// Options of draw_svg.
struct SvgOptions {
  // Hover text as <title> elements, which every viewer shows. False: as data-tip attributes (the microbatch
  // as data-m), for a script of the surrounding page.
  bool titles = true;
  bool heading = true;  // name, shape and totals above the rows
};

// Returns an SVG picture over time: a row per rank, a colored cell per action, axis, legend and totals.
std::string draw_svg(const Drawing& drawing, const SvgOptions& options = {});

// Returns an HTML page without external references: the picture with zoom and hover, a table of the ranks,
// and memory over time if the simulation has its curve.
std::string draw_html(const Drawing& drawing);

// Returns a trace in trace-event JSON for Perfetto (ui.perfetto.dev) and chrome://tracing: a process per rank
// with threads for computation, transfers and collectives, arrows for data from other ranks, and memory
// counters if the simulation has its curve. One unit of time is shown as one millisecond.
std::string draw_perfetto(const Drawing& drawing);

}  // namespace penstock::plan
