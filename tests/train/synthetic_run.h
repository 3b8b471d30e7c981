// A synthetic run: the events of an observer, and the resulting run folder.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "penstock/pipeline/report/step_trace.h"
#include "penstock/train/report/metrics_file.h"
#include "tests/pipeline/simulated_trace.h"

namespace penstock::test {

inline train::RunDescription made_description(const std::filesystem::path& folder) {
  train::RunDescription run;
  run.config.layout.schedule = "1F1B";
  run.config.training.steps = 200;
  run.config.output.run_folder = folder.string();
  run.folder = folder;
  run.ranks = 2;
  run.device = "cpu";
  run.libtorch = "1.13.0";
  run.parameters = 1234567;
  run.flops_per_token = 7.5e6;
  run.peak_flops = 3e11;
  run.partition = {"stage 0: embed, blocks 0-1, 0.605 M parameters",
                   "stage 1: blocks 2-3, norm, tied head, 0.630 M parameters"};
  run.tokens_per_step = 4096;
  run.training_tokens = 15000000;
  run.validation_tokens = 800000;
  return run;
}

// Losses decrease from 5.6 towards 2, with noise that depends only on the step.
inline double made_loss(std::int64_t step) {
  const auto at = static_cast<double>(step);
  return 2 + 3.6 * std::exp(-at / 40) + 0.08 * std::sin(at * 12.9898) * std::cos(at * 78.233);
}

inline train::StepOutcome made_step(std::int64_t step) {
  const auto at = static_cast<double>(step);
  train::StepOutcome outcome;
  outcome.step = step;
  outcome.loss = made_loss(step);
  outcome.grad_norm = 0.4 + 3 * std::exp(-at / 15) + 0.1 * std::sin(at * 4.1);
  outcome.lr = step <= 20 ? 2e-3 * at / 20 : 2e-4 + 0.9e-3 * (1 + std::cos(3.14159265 * (at - 20) / 180));
  outcome.tokens = 4096;
  outcome.times = {.data = 0.0004,
                   .schedule = 0.240 + 0.01 * std::sin(at),
                   .sync = 0.004,
                   .update = 0.006,
                   .total = 0.252 + 0.01 * std::sin(at)};
  return outcome;
}

inline train::StepExtras made_extras(std::int64_t step) {
  return {.tokens_per_second = 4096 / made_step(step).times.total,
          .seconds_left = 0.25 * static_cast<double>(200 - step),
          .resident_bytes = (std::int64_t{300} << 20) + step * 4096,
          .device_bytes = 0};
}

// Sends an observer steps `first` + 1 to `last`, with a validation every 50 steps and a checkpoint every 100.
inline void tell_steps(train::Observer& observer, std::int64_t first, std::int64_t last) {
  for (std::int64_t step = first + 1; step <= last; ++step) {
    observer.on_step(made_step(step), made_extras(step));
    if (step % 50 == 0) observer.on_validation(step, made_loss(step) + 0.1, 0.8);
    if (step % 100 == 0) observer.on_checkpoint(step, {.waiting = 0, .planning = 0.002, .copying = 0.011});
  }
}

struct MadeRun {
  std::string schedule = "1F1B";
  std::int64_t last_step = 200;
  bool ends = true;
  bool validates = true;
  bool traces = true;
  double slower = 1;
};

// A run folder: metrics, and traces of steps 10 and 100, whose actions took up to a fifth longer than usual.
inline void make_run_folder(const std::filesystem::path& folder, const MadeRun& made,
                            const std::function<void(train::RunDescription&)>& change = {}) {
  double now = 1.7e9;
  train::MetricsFile file([&] { return now += 0.2; });
  train::RunDescription run = made_description(folder);
  run.config.layout.schedule = made.schedule;
  if (change) change(run);
  file.on_start(run);
  if (made.validates) file.on_validation(0, 5.65, 0.8);
  for (std::int64_t step = 1; step <= made.last_step; ++step) {
    train::StepOutcome outcome = made_step(step);
    train::StepExtras extras = made_extras(step);
    for (double* part : {&outcome.times.data, &outcome.times.schedule, &outcome.times.total})
      *part *= made.slower;
    extras.tokens_per_second /= made.slower;
    file.on_step(outcome, extras);
    if (made.traces && (step == 10 || step == 100)) {
      StepTrace trace = simulated_trace(made.schedule, 2, 8);
      std::uint64_t state = 7;
      std::vector<std::int64_t> late(trace.ranks.size(), 0);
      // Everything on a rank shifts by the extra time of its actions; waits absorb what they can.
      for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank)
        for (TraceEvent& event : trace.ranks[rank]) {
          event.begin_ns = 7 * event.begin_ns + late[rank];
          event.end_ns = 7 * event.end_ns + late[rank];
          if (event.kind != TraceEvent::Kind::Compute) continue;
          state = state * 6364136223846793005u + 1442695040888963407u;
          const std::int64_t longer =
              (event.end_ns - event.begin_ns) / 100 * static_cast<std::int64_t>(state >> 60);
          event.end_ns += longer;
          late[rank] += longer;
        }
      trace.step = static_cast<std::uint64_t>(step);
      const std::filesystem::path path = folder / "traces" / ("step-" + std::to_string(step) + ".json");
      std::filesystem::create_directories(path.parent_path());
      write_trace(trace, path.string());
      file.on_trace(step, path);
    }
    if (made.validates && step % 50 == 0) file.on_validation(step, made_loss(step) + 0.1, 0.8);
    if (step % 100 == 0) file.on_checkpoint(step, {.waiting = 0, .planning = 0.002, .copying = 0.011});
  }
  if (made.ends) file.on_end(train::RunEnd::Finished, made.last_step);
}

}  // namespace penstock::test
