// A trace of a step that ran exactly as simulated: stages of different costs, transfers of 0.1 ms.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "penstock/generators.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/simulator.h"

namespace penstock::test {

inline double made_cost(int stage, schedule::ActionKind kind) {
  const double forward = 1 + 0.25 * stage;
  return kind == schedule::ActionKind::Backward ? 2 * forward : forward;
}

inline StepTrace simulated_trace(const std::string& kind, int ranks, int microbatches,
                                 double overlap_saving = 0) {
  const bool is_v = kind == "ZBVZeroBubble" || kind == "DualPipeV";
  const schedule::Schedule lowered = executable(
      schedule::generate(schedule::schedule_kind(kind),
                         {.ranks = ranks, .stages_per_rank = is_v ? 2 : 1, .microbatches = microbatches}));
  plan::CostModel model;
  model.stages.clear();
  for (int stage = 0; stage < lowered.stages().stages(); ++stage) {
    const double cost = made_cost(stage, schedule::ActionKind::Forward);
    model.stages.push_back({.forward = cost, .backward_input = cost, .backward_weight = cost});
  }
  model.latency = 0.1;
  model.overlap_saving = overlap_saving;
  const plan::Simulation simulation = plan::simulate(lowered, model);

  const auto ns = [](double ms) { return static_cast<std::int64_t>(std::llround(ms * 1e6)); };
  StepTrace trace{.step = 3, .schedule = lowered};
  for (int rank = 0; rank < ranks; ++rank) {
    const Program program = compile_program(lowered, rank);
    const schedule::Row& row = lowered.row(rank);
    const auto start_of = [&](const schedule::Action& action) {
      for (std::size_t slot = 0; slot < row.size(); ++slot)
        for (const schedule::Action& each : row[slot])
          if (each == action) return simulation.slots[static_cast<std::size_t>(rank)][slot];
      return plan::TimedSlot{};
    };
    // Awaits fill the time until the action that needs them; instructions that only start something take no
    // time.
    std::vector<TimedInstruction> times;
    std::int64_t now = 0;
    for (std::size_t i = 0; i < program.instructions.size(); ++i) {
      const Instruction& each = program.instructions[i];
      std::int64_t end = now;
      if (each.kind == Instruction::Kind::Compute) {
        const plan::TimedSlot timed = start_of(each.action);
        now = ns(timed.start);
        end = ns(timed.end);
      } else if (each.kind == Instruction::Kind::Await) {
        for (std::size_t next = i + 1; next < program.instructions.size(); ++next)
          if (program.instructions[next].kind == Instruction::Kind::Compute) {
            end = std::max(end, ns(start_of(program.instructions[next].action).start));
            break;
          }
      }
      times.push_back({now, end});
      now = end;
    }
    times.push_back({now, now});
    trace.ranks.push_back(trace_events(program, times, 0));
    trace.clock_error_ns.push_back(rank * 10);
  }
  return trace;
}

}  // namespace penstock::test
