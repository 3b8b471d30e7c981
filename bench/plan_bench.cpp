// Time per action of the simulator at three sizes, for a compute-only and a lowered schedule. Measures CPU
// time of its single thread, so that other load does not affect it. Growth is linear if the times per action
// stay constant. Usage: plan_bench [kind]
#include <cstdio>
#include <ctime>
#include <string>

#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/simulator.h"

namespace {

using namespace penstock::schedule;

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void measure(const char* form, const PipelineShape& shape, const Schedule& schedule) {
  penstock::plan::CostModel model;
  model.latency = 0.1;
  double best = 1e30;
  double time = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double begin = processor_seconds();
    time = penstock::plan::simulate(schedule, model).time;
    best = std::min(best, processor_seconds() - begin);
  }
  const double actions = static_cast<double>(schedule.actions());
  std::printf("%5d x %d x %5d  %-12s %10.0f actions  %7.1f ns per action  %7.3f s  (simulated time %.1f)\n",
              shape.ranks, shape.stages_per_rank, shape.microbatches, form, actions, best / actions * 1e9,
              best, time);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const ScheduleKind kind = schedule_kind(argc > 1 ? argv[1] : "Interleaved1F1B");
  std::printf("simulate %s\n", std::string(to_text(kind)).c_str());
  for (const auto& [ranks, microbatches] : {std::pair{16, 128}, std::pair{64, 512}, std::pair{128, 2048}}) {
    PipelineShape shape;
    shape.ranks = ranks;
    shape.stages_per_rank = required_stages_per_rank(kind).value_or(2);
    shape.microbatches = microbatches;
    const Schedule schedule = generate(kind, shape);
    measure("compute-only", shape, schedule);
    measure("lowered", shape, lower(schedule));
  }
  return 0;
}
