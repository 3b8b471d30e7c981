#include "penstock/pipeline/report/trace_comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/simulator.h"
#include "penstock/validate.h"

namespace penstock {

using Kind = TraceEvent::Kind;
using schedule::Action;
using schedule::ActionKind;
using schedule::Slot;

namespace {

constexpr std::size_t kDelaysShown = 5;

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }
double duration_ms(const TraceEvent& event) { return milliseconds(event.end_ns - event.begin_ns); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

using CostKey = std::pair<int, ActionKind>;
using Samples = std::map<CostKey, std::vector<double>>;

CostKey key_of(const Action& action) { return {action.stage(), action.kind()}; }

// A backward computes about twice as much as a forward; only the proportion matters.
double usual_weight(ActionKind kind) { return kind == ActionKind::Backward ? 2 : 1; }

Samples single_samples(const StepTrace& trace) {
  Samples samples;
  for (const auto& events : trace.ranks)
    for (const TraceEvent& event : events)
      if ((event.kind == Kind::Compute || event.kind == Kind::Stage) && event.actions.size() == 1)
        samples[key_of(event.actions.front())].push_back(duration_ms(event));
  return samples;
}

template <class Visit>
void for_units(const StepTrace& trace, Visit visit) {
  for (const auto& events : trace.ranks)
    for (const TraceEvent& event : events)
      if (event.kind == Kind::Compute && event.actions.size() > 1) visit(event);
}

std::map<CostKey, double> medians_of(const Samples& samples) {
  std::map<CostKey, double> medians;
  for (const auto& [key, values] : samples) medians[key] = median(values);
  return medians;
}

// Costs of kinds that occur only in overlapped units: a share of the unit, in proportion to the cost of the
// kind elsewhere.
void add_shares_of_units(const StepTrace& trace, std::map<CostKey, double>& medians) {
  std::map<ActionKind, std::vector<double>> of_kind;
  for (const auto& [key, value] : medians) of_kind[key.second].push_back(value);
  double unit = 1;  // cost of a forward, if known
  if (const auto at = of_kind.find(ActionKind::Forward); at != of_kind.end()) unit = median(at->second);
  const auto expected = [&](const Action& action) {
    if (const auto own = medians.find(key_of(action)); own != medians.end()) return own->second;
    if (const auto other = of_kind.find(action.kind()); other != of_kind.end()) return median(other->second);
    return usual_weight(action.kind()) * unit;
  };
  Samples shares;
  for_units(trace, [&](const TraceEvent& event) {
    double sum = 0;
    for (const Action& action : event.actions) sum += expected(action);
    for (const Action& action : event.actions)
      if (!medians.contains(key_of(action)))
        shares[key_of(action)].push_back(sum > 0 ? duration_ms(event) * expected(action) / sum : 0);
  });
  for (const auto& [key, values] : shares) medians[key] = median(values);
}

// The fraction of the shorter members of a unit that was hidden by the longest.
double measured_saving(const StepTrace& trace, const std::map<CostKey, double>& medians) {
  std::vector<double> savings;
  for_units(trace, [&](const TraceEvent& event) {
    double sum = 0, longest = 0;
    for (const Action& action : event.actions) {
      const double time = medians.at(key_of(action));
      sum += time;
      longest = std::max(longest, time);
    }
    if (sum > longest) savings.push_back(std::clamp((sum - duration_ms(event)) / (sum - longest), 0.0, 1.0));
  });
  return savings.empty() ? 0 : median(savings);
}

struct TransferTimes {
  int all = 0;
  std::vector<double> known;    // the receiver was waiting when the data was sent
  std::vector<double> at_most;  // upper bounds: the data had arrived after this time
};

TransferTimes transfer_times(const StepTrace& trace) {
  using TransferKey = std::tuple<Channel::Kind, int, int, int, int>;
  const auto key = [](const TraceEvent& event) {
    return TransferKey{event.channel->kind, event.channel->from_stage, event.channel->to_stage,
                       event.channel->skip, *event.actions.front().microbatch()};
  };
  std::map<TransferKey, const TraceEvent*> sends;
  for (const auto& events : trace.ranks)
    for (const TraceEvent& event : events)
      if (event.kind == Kind::Send) sends[key(event)] = &event;
  TransferTimes times;
  for (const auto& events : trace.ranks)
    for (const TraceEvent& event : events) {
      if (event.kind != Kind::Await) continue;
      const auto at = sends.find(key(event));
      if (at == sends.end()) continue;
      ++times.all;
      // Clocks may differ slightly; nothing arrives before it is sent.
      const double time = std::max(0.0, milliseconds(event.end_ns - at->second->begin_ns));
      (event.begin_ns <= at->second->begin_ns ? times.known : times.at_most).push_back(time);
    }
  return times;
}

double latency_of(const TransferTimes& times) {
  if (!times.known.empty()) return median(times.known);
  return times.at_most.empty() ? 0 : *std::min_element(times.at_most.begin(), times.at_most.end());
}

// Finds the slot of a rank's row that holds an action.
std::map<std::pair<CostKey, int>, std::uint32_t> slots_of(const schedule::Row& row) {
  std::map<std::pair<CostKey, int>, std::uint32_t> slots;
  for (std::size_t slot = 0; slot < row.size(); ++slot)
    for (const Action& action : row[slot])
      if (schedule::is_compute(action.kind()))
        slots[{key_of(action), *action.microbatch()}] = static_cast<std::uint32_t>(slot);
  return slots;
}

void add_costs(const Samples& samples, TraceComparison& comparison) {
  for (const auto& [key, values] : samples) {
    ActionCost cost{.stage = key.first, .kind = key.second, .count = static_cast<int>(values.size())};
    cost.mean_ms = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
    cost.median_ms = median(values);
    cost.least_ms = *std::min_element(values.begin(), values.end());
    cost.most_ms = *std::max_element(values.begin(), values.end());
    cost.simulated_ms = comparison.model.time_of(key.second, key.first);
    comparison.costs.push_back(cost);
  }
}

}  // namespace

plan::CostModel measured_costs(const StepTrace& trace) {
  std::map<CostKey, double> medians = medians_of(single_samples(trace));
  add_shares_of_units(trace, medians);
  plan::CostModel model;
  model.stages.assign(static_cast<std::size_t>(trace.schedule.stages().stages()),
                      {.forward = 0, .backward_input = 0, .backward_weight = 0});
  for (const auto& [key, time] : medians) {
    plan::StageCost& stage = model.stages[static_cast<std::size_t>(key.first)];
    switch (key.second) {
      case ActionKind::Forward:
        stage.forward = time;
        break;
      case ActionKind::Backward:
        stage.backward = time;
        break;
      case ActionKind::BackwardInput:
        stage.backward_input = time;
        break;
      case ActionKind::BackwardWeight:
        stage.backward_weight = time;
        break;
      case ActionKind::Unshard:
        stage.unshard = time;
        break;
      case ActionKind::ReduceGrad:
        stage.reduce_grad = time;
        break;
      case ActionKind::Reshard:
      case ActionKind::SendForward:
      case ActionKind::RecvForward:
      case ActionKind::SendBackward:
      case ActionKind::RecvBackward:
        break;  // no cost of their own
    }
  }
  model.overlap_saving = measured_saving(trace, medians);
  model.latency = latency_of(transfer_times(trace));
  return model;
}

TraceComparison compare_with_simulation(const StepTrace& trace) {
  // Evaluation runs only the forwards of a schedule, so missing actions are allowed and misplaced ones are
  // not.
  const schedule::Report report = schedule::check(trace.schedule, {.sends = schedule::SendModel::Posted});
  if (!report.ok() && report.violations.front().kind < schedule::ViolationKind::Missing)
    throw ConfigError(fmt::format("schedule of the trace: {}", report.violations.front().text));
  TraceComparison comparison;
  comparison.model = measured_costs(trace);
  plan::Simulation simulation;
  try {
    simulation = plan::simulate(trace.schedule, comparison.model);
  } catch (const ValueError& error) {
    throw ConfigError(fmt::format("schedule of the trace: {}", error.what()));
  }
  comparison.measured_ms = milliseconds(trace.duration_ns());
  comparison.simulated_ms = simulation.time;
  const TransferTimes transfers = transfer_times(trace);
  comparison.transfers = transfers.all;
  comparison.measured_transfers = static_cast<int>(transfers.known.size());
  add_costs(single_samples(trace), comparison);

  for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
    RankComparison& row = comparison.ranks.emplace_back();
    const auto slots = slots_of(trace.schedule.row(static_cast<int>(rank)));
    const std::vector<plan::TimedSlot>& timed = simulation.slots[rank];
    for (const plan::TimedSlot& slot : timed) row.simulated_ms = std::max(row.simulated_ms, slot.end);
    row.simulated_busy_ms = simulation.ranks[rank].busy;
    for (const TraceEvent& event : trace.ranks[rank]) {
      row.measured_ms = std::max(row.measured_ms, milliseconds(event.end_ns));
      if (event.kind == Kind::Await || event.kind == Kind::Finish) row.wait_ms += duration_ms(event);
      if (event.kind != Kind::Compute) continue;
      row.busy_ms += duration_ms(event);
      const Action& first = event.actions.front();
      const auto slot = slots.find({key_of(first), *first.microbatch()});
      if (slot == slots.end())
        throw ConfigError(describe(fmt::format("event of rank {} in the trace", rank), action_text(event),
                                   "an action of its schedule", "use an unmodified trace file"));
      comparison.actions.push_back({static_cast<int>(rank), action_text(event), milliseconds(event.begin_ns),
                                    milliseconds(event.end_ns), timed[slot->second].start,
                                    timed[slot->second].end});
    }
  }
  return comparison;
}

std::vector<ActionComparison> TraceComparison::greatest_delays(std::size_t count) const {
  std::vector<ActionComparison> sorted = actions;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.delay_ms() > b.delay_ms(); });
  if (sorted.size() > count) sorted.resize(count);
  return sorted;
}

std::string to_text(const TraceComparison& comparison) {
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "step: measured {:.3f} ms, simulated {:.3f} ms, efficiency {:.1f} %\n",
                 comparison.measured_ms, comparison.simulated_ms, 100 * comparison.efficiency());
  if (comparison.measured_transfers > 0) {
    fmt::format_to(out, "transfer: {:.3f} ms, median of the {} of {} for which a rank was waiting\n",
                   comparison.model.latency, comparison.measured_transfers, comparison.transfers);
  } else if (comparison.transfers > 0) {
    fmt::format_to(
        out,
        "transfer: at most {:.3f} ms; no rank was waiting for any of the {}, so their time is not known\n",
        comparison.model.latency, comparison.transfers);
  }
  if (comparison.model.overlap_saving > 0)
    fmt::format_to(out, "overlapped units: {:.0f} % of the shorter member hidden\n",
                   100 * comparison.model.overlap_saving);
  fmt::format_to(out, "\n{:>5} {:>11} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10}\n", "stage", "action", "count",
                 "mean ms", "median ms", "least ms", "most ms", "simulated");
  for (const ActionCost& cost : comparison.costs)
    fmt::format_to(out, "{:>5} {:>11} {:>6} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.3f}\n", cost.stage,
                   schedule::to_text(cost.kind), cost.count, cost.mean_ms, cost.median_ms, cost.least_ms,
                   cost.most_ms, cost.simulated_ms);
  fmt::format_to(out, "\n{:>5} {:>12} {:>12} {:>11} {:>10} {:>14} {:>10}\n", "rank", "measured ms",
                 "simulated ms", "efficiency", "busy ms", "simulated busy", "wait ms");
  for (std::size_t rank = 0; rank < comparison.ranks.size(); ++rank) {
    const RankComparison& row = comparison.ranks[rank];
    fmt::format_to(out, "{:>5} {:>12.3f} {:>12.3f} {:>9.1f} % {:>10.3f} {:>14.3f} {:>10.3f}\n", rank,
                   row.measured_ms, row.simulated_ms, 100 * row.efficiency(), row.busy_ms,
                   row.simulated_busy_ms, row.wait_ms);
  }
  const auto delays = comparison.greatest_delays(kDelaysShown);
  fmt::format_to(out, "\ngreatest delays relative to the simulation:\n{:>5} {:>14} {:>12} {:>13} {:>10}\n",
                 "rank", "action", "measured ms", "simulated ms", "delay ms");
  for (const ActionComparison& action : delays)
    fmt::format_to(out, "{:>5} {:>14} {:>12.3f} {:>13.3f} {:>10.3f}\n", action.rank, action.action,
                   action.begin_ms, action.simulated_begin_ms, action.delay_ms());
  return text;
}

std::string to_csv(const TraceComparison& comparison) {
  std::string text = "rank,action,begin_ms,end_ms,simulated_begin_ms,simulated_end_ms,delay_ms\n";
  for (const ActionComparison& action : comparison.actions)
    fmt::format_to(std::back_inserter(text), "{},{},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f}\n", action.rank,
                   action.action, action.begin_ms, action.end_ms, action.simulated_begin_ms,
                   action.simulated_end_ms, action.delay_ms());
  return text;
}

}  // namespace penstock
