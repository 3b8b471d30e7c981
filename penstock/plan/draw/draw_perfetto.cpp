#include "penstock/draw.h"
#include "penstock/plan/draw/drawing.h"

#include <cstdint>
#include <nlohmann/json.hpp>

namespace penstock::plan {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kMicrosecondsPerUnit = 1000;
constexpr int kCompute = 0;
constexpr int kTransfers = 1;
constexpr int kCollectives = 2;

int thread_of(schedule::ActionKind kind) {
  if (is_compute(kind)) return kCompute;
  return is_stage_wide(kind) ? kCollectives : kTransfers;
}

Json name_event(const char* what, int rank, int thread, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", thread}, {"args", {{"name", name}}}};
}

}  // namespace

std::string draw_perfetto(const Drawing& drawing) {
  Json events = Json::array();
  std::uint64_t arrows = 0;
  for (int rank = 0; rank < drawing.schedule.ranks(); ++rank) {
    events.push_back(name_event("process_name", rank, 0, "rank " + std::to_string(rank)));
    events.push_back({{"name", "process_sort_index"},
                      {"ph", "M"},
                      {"pid", rank},
                      {"tid", 0},
                      {"args", {{"sort_index", rank}}}});
    events.push_back(name_event("thread_name", rank, kCompute, "compute"));
    if (drawing.schedule.has_transfers()) {
      events.push_back(name_event("thread_name", rank, kTransfers, "transfers"));
      events.push_back(name_event("thread_name", rank, kCollectives, "collectives"));
    }
    const schedule::Row& row = drawing.schedule.row(rank);
    for (std::size_t slot = 0; slot < row.size(); ++slot) {
      if (row[slot].empty()) continue;
      const schedule::Action& action = row[slot][0];
      const TimedSlot& timed = drawing.simulation.slots[static_cast<std::size_t>(rank)][slot];
      const double start = timed.start * kMicrosecondsPerUnit;
      Json args = {{"stage", action.stage()}};
      if (action.has_microbatch()) args["microbatch"] = *action.microbatch();
      args["waited_for"] = waited_for(drawing.schedule, drawing.simulation, timed.cause, timed.start);
      const int thread = thread_of(action.kind());
      events.push_back({{"name", to_text(row[slot])},
                        {"cat", std::string(to_text(action.kind()))},
                        {"ph", "X"},
                        {"pid", rank},
                        {"tid", thread},
                        {"ts", start},
                        {"dur", (timed.end - timed.start) * kMicrosecondsPerUnit},
                        {"args", std::move(args)}});
      if (timed.cause.kind != Cause::Kind::Data || timed.cause.rank == rank) continue;
      const TimedSlot& maker =
          drawing.simulation.slots[static_cast<std::size_t>(timed.cause.rank)][timed.cause.slot];
      // A flow event is attached to the slice that encloses it, so the arrow starts inside its source.
      const double leaves = (maker.start + (maker.end - maker.start) * 0.99) * kMicrosecondsPerUnit;
      events.push_back({{"name", "data"},
                        {"cat", "data"},
                        {"ph", "s"},
                        {"id", arrows},
                        {"pid", timed.cause.rank},
                        {"tid", kCompute},
                        {"ts", leaves}});
      events.push_back({{"name", "data"},
                        {"cat", "data"},
                        {"ph", "f"},
                        {"bp", "e"},
                        {"id", arrows++},
                        {"pid", rank},
                        {"tid", thread},
                        {"ts", start}});
    }
    if (drawing.simulation.memory_curve.empty()) continue;
    for (const MemoryPoint& point : drawing.simulation.memory_curve[static_cast<std::size_t>(rank)]) {
      const double time = point.time * kMicrosecondsPerUnit;
      events.push_back({{"name", "activations"},
                        {"ph", "C"},
                        {"pid", rank},
                        {"tid", 0},
                        {"ts", time},
                        {"args", {{"in flight", point.activations}}}});
      if (drawing.simulation.peak_bytes() > 0) {
        events.push_back({{"name", "memory"},
                          {"ph", "C"},
                          {"pid", rank},
                          {"tid", 0},
                          {"ts", time},
                          {"args", {{"bytes", point.bytes}}}});
      }
    }
  }
  const Json document = {
      {"displayTimeUnit", "ms"},
      {"otherData", {{"schedule", drawing.title}, {"totals", totals_words(drawing.simulation)}}},
      {"traceEvents", std::move(events)}};
  return document.dump() + "\n";
}

}  // namespace penstock::plan
