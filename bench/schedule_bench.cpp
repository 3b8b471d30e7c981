// Time per action of generating, validating, lowering and validating again, at three sizes, and the peak
// memory. Times are CPU time of the single thread, so that other load does not affect them; the total is also
// shown as elapsed time. Growth is linear if the times per action stay constant. Usage: schedule_bench [kind]
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>

#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/validate.h"

namespace {

using Clock = std::chrono::steady_clock;
using namespace penstock::schedule;

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double peak_memory_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

void measure(ScheduleKind kind, const PipelineShape& shape) {
  const Clock::time_point start = Clock::now();
  const double begin = processor_seconds();
  const Schedule schedule = generate(kind, shape);
  const double generated = processor_seconds() - begin;
  validate(schedule);
  const double validated = processor_seconds() - begin;
  const Schedule lowered = lower(schedule);
  const double done = processor_seconds() - begin;
  const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  validate(lowered);
  const double checked = processor_seconds() - begin;
  const double actions = static_cast<double>(schedule.actions());
  const double lowered_actions = static_cast<double>(lowered.actions());
  std::printf(
      "%5d x %d x %5d  %10.0f -> %10.0f  %7.1f %7.1f %7.1f %7.1f  %6.2f s (%.2f s elapsed)  %5.0f MiB\n",
      shape.ranks, shape.stages_per_rank, shape.microbatches, actions, lowered_actions,
      generated / actions * 1e9, (validated - generated) / actions * 1e9,
      (done - validated) / lowered_actions * 1e9, (checked - done) / lowered_actions * 1e9, done, elapsed,
      peak_memory_mib());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const ScheduleKind kind = schedule_kind(argc > 1 ? argv[1] : "Interleaved1F1B");
  const int chunks = required_stages_per_rank(kind).value_or(2);
  std::printf("%s; ns per action; total = generate + validate + lower\n", std::string(to_text(kind)).c_str());
  std::printf(
      "ranks x stages x microbatches  actions -> lowered  generate validate lower recheck  total  peak "
      "memory\n");
  for (const auto& [ranks, microbatches] :
       {std::pair{64, 512}, std::pair{256, 2048}, std::pair{1024, 4096}}) {
    PipelineShape shape;
    shape.ranks = ranks;
    shape.stages_per_rank = chunks;
    shape.microbatches = microbatches;
    measure(kind, shape);
  }
  return 0;
}
