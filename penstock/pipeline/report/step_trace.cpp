#include "penstock/pipeline/report/step_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/files.h"
#include "penstock/errors.h"
#include "penstock/schedule.h"

namespace penstock {

using Json = nlohmann::ordered_json;
using Kind = TraceEvent::Kind;
using schedule::Action;
using schedule::Schedule;

namespace {

constexpr int kVersion = 1;
constexpr Kind kKinds[] = {Kind::Compute, Kind::Post,  Kind::Await, Kind::Send,
                           Kind::Pass,    Kind::Stage, Kind::Finish};

constexpr int kComputeTrack = 0;
constexpr int kWaitTrack = 1;
constexpr int kTransferTrack = 2;
// Of overlapped units with exchanges.
constexpr int kForwardTrack = 3;
constexpr int kBackwardTrack = 4;
constexpr const char* kPieceCategory = "piece";
constexpr const char* kExchange = "exchange";  // marks a piece; without a mark it is computation

int track_of(Kind kind) {
  switch (kind) {
    case Kind::Compute:
    case Kind::Stage:
      return kComputeTrack;
    case Kind::Await:
    case Kind::Finish:
      return kWaitTrack;
    case Kind::Post:
    case Kind::Send:
    case Kind::Pass:
      return kTransferTrack;
  }
  PENSTOCK_INVARIANT(false, "a trace event of an unknown kind");
}

Kind kind_of(Instruction::Kind kind) {
  switch (kind) {
    case Instruction::Kind::Compute:
      return Kind::Compute;
    case Instruction::Kind::Post:
      return Kind::Post;
    case Instruction::Kind::Await:
      return Kind::Await;
    case Instruction::Kind::Send:
      return Kind::Send;
    case Instruction::Kind::Pass:
      return Kind::Pass;
    case Instruction::Kind::Stage:
      return Kind::Stage;
  }
  PENSTOCK_INVARIANT(false, "an instruction of an unknown kind");
}

double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000; }

// The key that a send and the wait that it ends have in common.
using TransferKey = std::tuple<Channel::Kind, int, int, int, int>;
TransferKey transfer_key(const TraceEvent& event) {
  const Channel& channel = *event.channel;
  return {channel.kind, channel.from_stage, channel.to_stage, channel.skip,
          *event.actions.front().microbatch()};
}

Json metadata(const char* what, int rank, int track, Json args) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", track}, {"args", std::move(args)}};
}

Json slice(int rank, const TraceEvent& event) {
  Json args = {{"kind", std::string(to_text(event.kind))}};
  Json actions = Json::array();
  for (const Action& action : event.actions) actions.push_back(schedule::to_text(action));
  args["actions"] = std::move(actions);
  if (event.channel) {
    const Channel& channel = *event.channel;
    args["channel"] = {{"of", channel.kind == Channel::Kind::Activation ? "activation" : "gradient"},
                       {"from_stage", channel.from_stage},
                       {"to_stage", channel.to_stage},
                       {"skip", channel.skip}};
  }
  if (!event.pieces.empty()) {
    Json pieces = Json::array();
    for (const UnitPiece& piece : event.pieces) {
      pieces.push_back({piece.member, piece.begin_ns, piece.end_ns});
      if (piece.kind == UnitPiece::Kind::Exchange) pieces.back().push_back(kExchange);
    }
    args["pieces"] = std::move(pieces);
  }
  args["begin_ns"] = event.begin_ns;
  args["end_ns"] = event.end_ns;
  return {{"name", action_text(event)},
          {"cat", std::string(to_text(event.kind))},
          {"ph", "X"},
          {"pid", rank},
          {"tid", track_of(event.kind)},
          {"ts", microseconds(event.begin_ns)},
          {"dur", microseconds(event.end_ns - event.begin_ns)},
          {"args", std::move(args)}};
}

bool has_exchanges(const TraceEvent& event) {
  return std::any_of(event.pieces.begin(), event.pieces.end(),
                     [](const UnitPiece& piece) { return piece.kind == UnitPiece::Kind::Exchange; });
}

// Pieces without exchanges never overlap and are shown within the slice of their unit, on its track. An
// exchange overlaps with pieces of other members, so that forwards and backwards have a track each.
int piece_track(const TraceEvent& event, const UnitPiece& piece) {
  if (!has_exchanges(event)) return track_of(event.kind);
  const Action& action = event.actions[static_cast<std::size_t>(piece.member)];
  return action.kind() == schedule::ActionKind::Forward ? kForwardTrack : kBackwardTrack;
}

// Only for display; parse_trace reads the pieces from the unit's slice.
Json piece_slice(int rank, const TraceEvent& event, const UnitPiece& piece) {
  const std::string action = schedule::to_text(event.actions[static_cast<std::size_t>(piece.member)]);
  return {{"name", piece.kind == UnitPiece::Kind::Exchange ? action + " exchange" : action},
          {"cat", kPieceCategory},
          {"ph", "X"},
          {"pid", rank},
          {"tid", piece_track(event, piece)},
          {"ts", microseconds(piece.begin_ns)},
          {"dur", microseconds(piece.end_ns - piece.begin_ns)}};
}

void add_arrows(const StepTrace& trace, Json& events) {
  std::map<TransferKey, std::pair<int, const TraceEvent*>> waits;
  for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank)
    for (const TraceEvent& event : trace.ranks[rank])
      if (event.kind == Kind::Await) waits[transfer_key(event)] = {static_cast<int>(rank), &event};
  int arrows = 0;
  for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank)
    for (const TraceEvent& event : trace.ranks[rank]) {
      if (event.kind != Kind::Send) continue;
      const auto at = waits.find(transfer_key(event));
      if (at == waits.end()) continue;
      const auto& [receiver, wait] = at->second;
      events.push_back({{"name", "data"},
                        {"cat", "data"},
                        {"ph", "s"},
                        {"id", arrows},
                        {"pid", rank},
                        {"tid", kTransferTrack},
                        {"ts", microseconds(event.begin_ns)}});
      // A viewer attaches an arrow to the slice that encloses its point, so it ends just before the end of
      // the wait.
      events.push_back({{"name", "data"},
                        {"cat", "data"},
                        {"ph", "f"},
                        {"bp", "e"},
                        {"id", arrows++},
                        {"pid", receiver},
                        {"tid", kWaitTrack},
                        {"ts", microseconds(std::max(wait->begin_ns, wait->end_ns - 1))}});
    }
}

[[noreturn]] void refuse(const std::string& what) {
  throw ConfigError(
      fmt::format("trace of a step: {}; use a file that write_trace of a pipeline has written", what));
}

std::vector<schedule::Chain> read_chains(const Json& value) {
  std::vector<schedule::Chain> chains;
  for (const Json& each : value)
    chains.push_back({each.at("first_stage").get<int>(), each.at("stages").get<int>(),
                      each.at("first_microbatch").get<int>(), each.at("microbatches").get<int>()});
  return chains;
}

Schedule read_schedule(const Json& own) {
  std::vector<schedule::Row> rows = schedule::parse_rows(own.at("schedule").get<std::string>());
  const auto ranks = static_cast<int>(rows.size());
  Schedule schedule(schedule::StageMap(ranks, own.at("stage_to_rank").get<std::vector<int>>(),
                                       read_chains(own.at("chains"))),
                    std::move(rows));
  for (const schedule::Row& row : schedule.rows())
    for (const schedule::Slot slot : row)
      for (const Action& action : slot)
        if (!schedule.stages().has_stage(action.stage()))
          refuse(fmt::format("its schedule has {}, of {} stages", schedule::to_text(action),
                             schedule.stages().stages()));
  return schedule;
}

Channel read_channel(const Json& value, const schedule::StageMap& map) {
  Channel channel;
  const auto of = value.at("of").get<std::string>();
  if (of != "activation" && of != "gradient") refuse(fmt::format("a channel of \"{}\"", of));
  channel.kind = of == "activation" ? Channel::Kind::Activation : Channel::Kind::Gradient;
  value.at("from_stage").get_to(channel.from_stage);
  value.at("to_stage").get_to(channel.to_stage);
  value.at("skip").get_to(channel.skip);
  for (const int stage : {channel.from_stage, channel.to_stage})
    if (!map.has_stage(stage))
      refuse(fmt::format("a channel of stage {}, of {} stages", stage, map.stages()));
  channel.from_rank = map.rank_of(channel.from_stage);
  channel.to_rank = map.rank_of(channel.to_stage);
  return channel;
}

TraceEvent read_event(const Json& args, const schedule::StageMap& map) {
  TraceEvent event;
  const auto name = args.at("kind").get<std::string>();
  const auto kind =
      std::find_if(std::begin(kKinds), std::end(kKinds), [&](Kind each) { return to_text(each) == name; });
  if (kind == std::end(kKinds)) refuse(fmt::format("an event of kind \"{}\"", name));
  event.kind = *kind;
  for (const Json& action : args.at("actions"))
    event.actions.push_back(schedule::parse_action(action.get<std::string>()));
  if (event.actions.empty() != (event.kind == Kind::Finish))
    refuse(fmt::format("an event of kind {} with {} actions", name, event.actions.size()));
  const bool transfers = event.kind == Kind::Post || event.kind == Kind::Await || event.kind == Kind::Send ||
                         event.kind == Kind::Pass;
  for (const Action& action : event.actions) {
    const bool fits = event.kind == Kind::Compute ? schedule::is_compute(action.kind())
                      : event.kind == Kind::Stage ? schedule::is_stage_wide(action.kind())
                                                  : action.has_microbatch();
    if (!map.has_stage(action.stage()) || !fits)
      refuse(fmt::format("an event of kind {} with the action {}", name, schedule::to_text(action)));
  }
  if (transfers) event.channel = read_channel(args.at("channel"), map);
  args.at("begin_ns").get_to(event.begin_ns);
  args.at("end_ns").get_to(event.end_ns);
  if (args.contains("pieces"))
    for (const Json& each : args.at("pieces")) {
      UnitPiece piece{each.at(0).get<int>(), each.at(1).get<std::int64_t>(), each.at(2).get<std::int64_t>()};
      if (each.size() > 3) {
        if (const auto mark = each.at(3).get<std::string>(); mark != kExchange)
          refuse(fmt::format("{} has a piece that is marked \"{}\"", action_text(event), mark));
        piece.kind = UnitPiece::Kind::Exchange;
      }
      if (piece.member < 0 || static_cast<std::size_t>(piece.member) >= event.actions.size())
        refuse(fmt::format("{} has a piece of member {}", action_text(event), piece.member));
      if (piece.begin_ns < event.begin_ns || piece.end_ns < piece.begin_ns || piece.end_ns > event.end_ns)
        refuse(fmt::format("{} has a piece outside of it", action_text(event)));
      event.pieces.push_back(piece);
    }
  if (event.end_ns < event.begin_ns) refuse(fmt::format("{} ends before it begins", action_text(event)));
  return event;
}

StepTrace read_document(const Json& document) {
  if (!document.is_object() || !document.contains("penstock")) refuse("it has no key \"penstock\"");
  const Json& own = document.at("penstock");
  if (const int version = own.at("version").get<int>(); version != kVersion)
    refuse(fmt::format(
        "it has version {}, this build reads {}{}", version, kVersion,
        version > kVersion ? "; it was written by a newer version of Penstock: use that one" : ""));
  StepTrace trace{.schedule = read_schedule(own)};
  own.at("step").get_to(trace.step);
  own.at("clock_error_ns").get_to(trace.clock_error_ns);
  const auto ranks = static_cast<std::size_t>(trace.schedule.ranks());
  if (trace.clock_error_ns.size() != ranks)
    refuse(fmt::format("it has clocks of {} ranks and a schedule of {}", trace.clock_error_ns.size(), ranks));
  trace.ranks.resize(ranks);
  for (const Json& event : document.at("traceEvents")) {
    if (event.at("ph").get<std::string>() != "X" || event.value("cat", "") == kPieceCategory) continue;
    const auto rank = event.at("pid").get<std::int64_t>();
    if (rank < 0 || rank >= trace.schedule.ranks())
      refuse(fmt::format("an event of rank {}, of {} ranks", rank, ranks));
    trace.ranks[static_cast<std::size_t>(rank)].push_back(
        read_event(event.at("args"), trace.schedule.stages()));
  }
  return trace;
}

}  // namespace

std::string_view to_text(Kind kind) {
  switch (kind) {
    case Kind::Compute:
      return "compute";
    case Kind::Post:
      return "post";
    case Kind::Await:
      return "await";
    case Kind::Send:
      return "send";
    case Kind::Pass:
      return "pass";
    case Kind::Stage:
      return "stage";
    case Kind::Finish:
      return "finish";
  }
  PENSTOCK_INVARIANT(false, "a trace event of an unknown kind");
}

std::string action_text(const TraceEvent& event) {
  if (event.kind == Kind::Finish) return "finish";
  std::string text;
  for (const Action& action : event.actions) text += (text.empty() ? "" : "|") + schedule::to_text(action);
  return text;
}

std::int64_t StepTrace::duration_ns() const {
  std::int64_t first = std::numeric_limits<std::int64_t>::max(),
               last = std::numeric_limits<std::int64_t>::min();
  for (const auto& events : ranks)
    for (const TraceEvent& event : events) {
      first = std::min(first, event.begin_ns);
      last = std::max(last, event.end_ns);
    }
  return last > first ? last - first : 0;
}

std::vector<TraceEvent> trace_events(const Program& program, const std::vector<TimedInstruction>& times,
                                     std::int64_t offset_ns) {
  if (times.size() != program.instructions.size() + 1)
    throw ValueError(
        describe(fmt::format("times of rank {}", program.rank), std::to_string(times.size()),
                 fmt::format("{}, one per instruction and one for the end", program.instructions.size() + 1),
                 "use the times of the program itself"));
  std::vector<TraceEvent> events;
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    if (instruction.kind == Instruction::Kind::Compute && instruction.members == 0) {
      events.back().actions.push_back(instruction.action);
      continue;
    }
    TraceEvent event{.kind = kind_of(instruction.kind), .actions = {instruction.action}};
    if (instruction.channel >= 0)
      event.channel = program.channels[static_cast<std::size_t>(instruction.channel)];
    event.begin_ns = times[i].begin_ns + offset_ns;
    event.end_ns = times[i].end_ns + offset_ns;
    for (const UnitPiece& piece : times[i].pieces)
      event.pieces.push_back(
          {piece.member, piece.begin_ns + offset_ns, piece.end_ns + offset_ns, piece.kind});
    events.push_back(std::move(event));
  }
  events.push_back({.kind = Kind::Finish,
                    .begin_ns = times.back().begin_ns + offset_ns,
                    .end_ns = times.back().end_ns + offset_ns});
  return events;
}

void start_at_zero(StepTrace& trace) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const auto& events : trace.ranks)
    for (const TraceEvent& event : events) first = std::min(first, event.begin_ns);
  for (auto& events : trace.ranks)
    for (TraceEvent& event : events) {
      event.begin_ns -= first;
      event.end_ns -= first;
      for (UnitPiece& piece : event.pieces) {
        piece.begin_ns -= first;
        piece.end_ns -= first;
      }
    }
}

std::string to_chrome_json(const StepTrace& trace) {
  Json events = Json::array();
  for (std::size_t r = 0; r < trace.ranks.size(); ++r) {
    const int rank = static_cast<int>(r);
    events.push_back(metadata("process_name", rank, 0, {{"name", fmt::format("rank {}", rank)}}));
    events.push_back(metadata("process_sort_index", rank, 0, {{"sort_index", rank}}));
    events.push_back(metadata("thread_name", rank, kComputeTrack, {{"name", "compute"}}));
    events.push_back(metadata("thread_name", rank, kWaitTrack, {{"name", "waits"}}));
    events.push_back(metadata("thread_name", rank, kTransferTrack, {{"name", "transfers"}}));
    if (std::any_of(trace.ranks[r].begin(), trace.ranks[r].end(), has_exchanges)) {
      events.push_back(metadata("thread_name", rank, kForwardTrack, {{"name", "forwards of units"}}));
      events.push_back(metadata("thread_name", rank, kBackwardTrack, {{"name", "backwards of units"}}));
    }
    for (const TraceEvent& event : trace.ranks[r]) {
      events.push_back(slice(rank, event));
      for (const UnitPiece& piece : event.pieces) events.push_back(piece_slice(rank, event, piece));
    }
  }
  add_arrows(trace, events);
  const schedule::StageMap& map = trace.schedule.stages();
  Json chains = Json::array();
  for (const schedule::Chain& chain : map.chains())
    chains.push_back({{"first_stage", chain.first_stage},
                      {"stages", chain.stages},
                      {"first_microbatch", chain.first_microbatch},
                      {"microbatches", chain.microbatches}});
  Json own = {{"version", kVersion},
              {"step", trace.step},
              {"stage_to_rank", map.stage_to_rank()},
              {"chains", std::move(chains)},
              {"clock_error_ns", trace.clock_error_ns},
              {"schedule", schedule::to_csv(trace.schedule)}};
  const Json document = {
      {"displayTimeUnit", "ms"}, {"penstock", std::move(own)}, {"traceEvents", std::move(events)}};
  return document.dump() + "\n";
}

StepTrace parse_trace(std::string_view json) {
  try {
    return read_document(Json::parse(json));
  } catch (const Json::exception& error) {
    refuse(without_json_tag(error.what()));
  } catch (const ConfigError&) {
    throw;
  } catch (const ValueError& error) {  // a stage map that contradicts itself, an action out of bounds
    refuse(error.what());
  }
}

void write_trace(const StepTrace& trace, const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << to_chrome_json(trace);
  file.close();
  if (!file)
    throw ConfigError(describe("trace file", path, "a file that can be written",
                               "check the folder, permissions and free space"));
}

StepTrace read_trace(const std::string& path) {
  const std::string text = read_file(
      path, "trace file", "pass a file that penstock train or write_trace of a pipeline has written");
  try {
    return parse_trace(text);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", path, error.what()));
  }
}

}  // namespace penstock
