#include "penstock/plan/simulate/simulation_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "penstock/base/quote.h"
#include "penstock/base/text.h"

namespace penstock::plan {

namespace {

constexpr std::size_t kWaitsShown = 5;

std::string waited_for(const schedule::Schedule& schedule, const Simulation& simulation,
                       const CriticalAction& step) {
  return waited_for(schedule, simulation, step.cause, step.start);
}

}  // namespace

std::string to_text(const schedule::Schedule& schedule, const Simulation& simulation) {
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "time {:.6g}, bubble {:.2f} % of the step, {:.2f} % within the ranks' spans\n",
                 simulation.time, 100 * simulation.bubble, 100 * simulation.span_bubble);
  fmt::format_to(out, "{:>5} {:>10} {:>10} {:>10} {:>10} {:>12} {:>11}\n", "rank", "busy", "idle", "first",
                 "last", "activations", "memory");
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const RankSummary& summary = simulation.ranks[rank];
    fmt::format_to(out, "{:>5} {:>10.6g} {:>10.6g} {:>10.6g} {:>10.6g} {:>12} {:>11}\n", rank, summary.busy,
                   summary.idle, summary.first, summary.last, summary.peak_activations,
                   format_bytes(static_cast<std::uint64_t>(summary.peak_bytes)));
  }

  // Of the critical path, only show the places where data came from another rank.
  std::vector<const CriticalAction*> changes;
  double computing = 0;
  for (const CriticalAction& step : simulation.critical_path) {
    const schedule::Slot slot = schedule.row(step.rank)[step.slot];
    if (!slot.empty() && is_compute(slot[0].kind())) computing += step.end - step.start;
    if (step.cause.kind == Cause::Kind::Data) changes.push_back(&step);
  }
  fmt::format_to(out, "critical path: {}, {:.6g} computing and {:.6g} in transfer; changes rank {}\n",
                 count_of(simulation.critical_path.size(), "action"), computing,
                 std::max(0.0, simulation.time - computing), count_of(changes.size(), "time"));
  const std::size_t shown = std::min(changes.size(), kWaitsShown);
  for (std::size_t i = changes.size() - shown; i < changes.size(); ++i) {
    const CriticalAction& step = *changes[i];
    fmt::format_to(out, "  {} on rank {} started at {:.6g}: waited for {}\n",
                   to_text(schedule.row(step.rank)[step.slot]), step.rank, step.start,
                   waited_for(schedule, simulation, step));
  }
  if (shown < changes.size())
    fmt::format_to(out, "  (the last {} of {}; --format json has the whole path)\n", shown, changes.size());
  return text;
}

std::string to_json(const schedule::Schedule& schedule, const Simulation& simulation) {
  nlohmann::ordered_json per_rank = nlohmann::ordered_json::array();
  for (const RankSummary& summary : simulation.ranks) {
    per_rank.push_back({{"busy", summary.busy},
                        {"idle", summary.idle},
                        {"peak_activations", summary.peak_activations},
                        {"peak_bytes", summary.peak_bytes}});
  }
  nlohmann::ordered_json path = nlohmann::ordered_json::array();
  for (const CriticalAction& step : simulation.critical_path) {
    path.push_back({{"action", to_text(schedule.row(step.rank)[step.slot])},
                    {"rank", step.rank},
                    {"start", step.start},
                    {"end", step.end},
                    {"waited_for", waited_for(schedule, simulation, step)}});
  }
  const nlohmann::ordered_json document = {{"time", simulation.time},
                                           {"bubble", simulation.bubble},
                                           {"span_bubble", simulation.span_bubble},
                                           {"per_rank", std::move(per_rank)},
                                           {"critical_path", std::move(path)}};
  return document.dump(2) + "\n";
}

}  // namespace penstock::plan
