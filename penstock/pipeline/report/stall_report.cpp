#include "penstock/pipeline/report/stall_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock {

using Json = nlohmann::ordered_json;
using State = RankPlace::State;

namespace {

constexpr State kStates[] = {State::NoStatus,  State::Lost,    State::Between,  State::Agreeing,
                             State::Computing, State::Waiting, State::Finishing};

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", format_list(ranks));
}

Json to_json_value(const RankPlace& place) {
  Json value = {{"rank", place.rank},
                {"state", std::string(to_text(place.state))},
                {"step", place.step},
                {"for_s", place.for_s},
                {"said_s_ago", place.said_s_ago},
                {"instruction", place.instruction}};
  if (place.stage) value["stage"] = *place.stage;
  if (place.microbatch) value["microbatch"] = *place.microbatch;
  value["kind"] = place.kind;
  value["waits_for"] = place.waits_for;
  value["error"] = place.error;
  value["own_error"] = place.own_error;
  return value;
}

// Returns the ranks that a rank waits for, given where the others are.
std::vector<int> waits_of(const RankPlace& place, const std::vector<RankPlace>& places) {
  std::vector<int> found;
  switch (place.state) {
    case State::NoStatus:
    case State::Lost:
    case State::Between:
    case State::Computing:
      break;
    case State::Waiting:
      found = place.waits_for;
      break;
    case State::Agreeing:
      for (const RankPlace& other : places) {
        const bool there =
            other.step > place.step || (other.step == place.step && other.state == State::Agreeing);
        if (other.rank != place.rank &&
            (!there || other.state == State::NoStatus || other.state == State::Lost))
          found.push_back(other.rank);
      }
      break;
    case State::Finishing:
      for (const RankPlace& other : places) {
        const bool receives =
            std::find(place.waits_for.begin(), place.waits_for.end(), other.rank) != place.waits_for.end();
        const bool through =
            other.step > place.step ||
            (other.step == place.step && (other.state == State::Finishing || other.state == State::Between));
        if (receives && (!through || other.state == State::NoStatus || other.state == State::Lost))
          found.push_back(other.rank);
      }
      break;
  }
  return found;
}

class Waits {
 public:
  explicit Waits(const std::vector<RankPlace>& places) {
    for (const RankPlace& place : places) edges_[place.rank] = waits_of(place, places);
    // A rank may wait for one that has no entry in the report; that one has no edges of its own.
    std::vector<int> unknown;
    for (const auto& [rank, to] : edges_)
      for (const int other : to)
        if (!edges_.contains(other)) unknown.push_back(other);
    for (const int rank : unknown) edges_[rank];
  }

  // Returns the first cycle found, starting from the lowest rank; empty if there is none.
  std::vector<int> cycle() const {
    std::set<int> done;
    for (const auto& [start, _] : edges_) {
      std::vector<int> path;
      if (find_cycle(start, path, done)) return path;
    }
    return {};
  }

  // Returns all ranks from which a path of waits leads to one of `targets`, without the targets.
  std::vector<int> held_up_by(const std::vector<int>& targets) const {
    std::set<int> reached(targets.begin(), targets.end());
    for (bool grew = true; grew;) {
      grew = false;
      for (const auto& [rank, to] : edges_)
        if (!reached.contains(rank) &&
            std::any_of(to.begin(), to.end(), [&](int other) { return reached.contains(other); }))
          grew = reached.insert(rank).second;
    }
    for (const int target : targets) reached.erase(target);
    return {reached.begin(), reached.end()};
  }

 private:
  // On success `path` is the cycle.
  bool find_cycle(int rank, std::vector<int>& path, std::set<int>& done) const {
    if (const auto at = std::find(path.begin(), path.end(), rank); at != path.end()) {
      path.erase(path.begin(), at);
      return true;
    }
    if (done.contains(rank)) return false;
    path.push_back(rank);
    for (const int next : edges_.at(rank))
      if (find_cycle(next, path, done)) return true;
    path.pop_back();
    done.insert(rank);
    return false;
  }

  std::map<int, std::vector<int>> edges_;
};

std::string cause_text(const StallReport& report) {
  const StallCause& cause = report.cause;
  const std::string who = ranks_text(cause.ranks);
  const bool many = cause.ranks.size() > 1;
  const std::string held =
      cause.held_up.empty() ? "" : fmt::format(" and holds up {}", ranks_text(cause.held_up));
  const auto place = std::find_if(report.places.begin(), report.places.end(), [&](const RankPlace& each) {
    return !cause.ranks.empty() && each.rank == cause.ranks.front();
  });
  const std::string doing = place == report.places.end() ? "" : to_text(*place);
  switch (cause.kind) {
    case StallCause::Kind::Unknown:
      return "no rank waits for another: all continue, or the step was aborted before it stalled";
    case StallCause::Kind::LostRank:
      return fmt::format("{} {} lost{}", who, many ? "were" : "was", held);
    case StallCause::Kind::Failure:
      return fmt::format("{} failed{}: {}", who, held, place == report.places.end() ? "" : place->error);
    case StallCause::Kind::Cycle: {
      std::string chain;
      for (const int rank : cause.ranks) chain += fmt::format("rank {} waits for ", rank);
      return fmt::format("deadlock: {}rank {}{}", chain, cause.ranks.front(), held);
    }
    case StallCause::Kind::SilentRank:
      return fmt::format("no status from {}, which {} stopped or cut off{}", who, many ? "are" : "is", held);
    case StallCause::Kind::BusyRank:
      return fmt::format("{} is busy{}: {}", who, held, doing);
    case StallCause::Kind::AbsentRank:
      return fmt::format("{} {} not in the step that the others are in{}: {}", who, many ? "are" : "is", held,
                         doing);
  }
  PENSTOCK_INVARIANT(false, "a cause of an unknown kind");
}

}  // namespace

std::string_view to_text(State state) {
  switch (state) {
    case State::NoStatus:
      return "no word";
    case State::Lost:
      return "lost";
    case State::Between:
      return "between steps";
    case State::Agreeing:
      return "agreeing";
    case State::Computing:
      return "computing";
    case State::Waiting:
      return "waiting";
    case State::Finishing:
      return "finishing";
  }
  PENSTOCK_INVARIANT(false, "a place of an unknown state");
}

std::string to_text(const RankPlace& place) {
  std::string text;
  const std::string when = fmt::format("step {}, for {:.1f} s", place.step, place.for_s);
  switch (place.state) {
    case State::NoStatus:
      return place.error.empty() ? "no status" : "no status: " + place.error;
    case State::Lost:
      text = place.instruction.empty()
                 ? "lost"
                 : fmt::format("lost; last status in step {}: {}", place.step, place.instruction);
      break;
    case State::Between:
      text = place.step == 0 ? "no step begun"
                             : fmt::format("after step {}, for {:.1f} s", place.step, place.for_s);
      break;
    case State::Agreeing:
      text = when + ": agrees with all ranks on the step";
      break;
    case State::Computing:
      text = fmt::format("{}: {}", when, place.instruction);
      break;
    case State::Waiting:
      text = fmt::format("{}: {}, waits for {}", when, place.instruction, ranks_text(place.waits_for));
      break;
    case State::Finishing:
      text = fmt::format("{}: waits until {} received its data", when, ranks_text(place.waits_for));
      break;
  }
  // The status is renewed every second while a rank makes no progress.
  if (place.said_s_ago >= 2) text += fmt::format(" ({:.1f} s ago)", place.said_s_ago);
  // An error that only follows from another rank's failure adds no information.
  if (!place.error.empty() && (place.own_error || place.state == State::Lost))
    text += fmt::format("; ended by: {}", place.error);
  return text;
}

std::string_view to_text(StallCause::Kind kind) {
  switch (kind) {
    case StallCause::Kind::Unknown:
      return "unknown";
    case StallCause::Kind::LostRank:
      return "lost rank";
    case StallCause::Kind::Failure:
      return "failure";
    case StallCause::Kind::Cycle:
      return "cycle";
    case StallCause::Kind::SilentRank:
      return "silent rank";
    case StallCause::Kind::BusyRank:
      return "busy rank";
    case StallCause::Kind::AbsentRank:
      return "absent rank";
  }
  PENSTOCK_INVARIANT(false, "a cause of an unknown kind");
}

RankPlace place_of(const StepProgress::Now& now, const Program& program, const std::vector<int>& ranks,
                   std::int64_t now_ns) {
  RankPlace place;
  place.rank = ranks[static_cast<std::size_t>(program.rank)];
  place.step = now.step;
  place.for_s = static_cast<double>(now_ns - now.since_ns) / 1e9;
  const auto global = [&](int pipeline_rank) { return ranks[static_cast<std::size_t>(pipeline_rank)]; };
  if (now.instruction == StepProgress::kAgreeing || now.instruction == StepProgress::kInferring) {
    place.state = State::Agreeing;
  } else if (now.instruction == StepProgress::kFinishing) {
    place.state = State::Finishing;
    std::set<int> receivers;
    for (const Instruction& each : program.instructions)
      if (each.kind == Instruction::Kind::Send)
        receivers.insert(global(program.channels[static_cast<std::size_t>(each.channel)].to_rank));
    place.waits_for.assign(receivers.begin(), receivers.end());
  } else if (now.instruction < 0 ||
             now.instruction >= static_cast<std::int64_t>(program.instructions.size())) {
    place.state = State::Between;
    if (now.since_ns == 0) place.for_s = 0;
  } else {
    const auto at = static_cast<std::size_t>(now.instruction);
    const Instruction& instruction = program.instructions[at];
    place.state = instruction.kind == Instruction::Kind::Await ? State::Waiting : State::Computing;
    place.instruction = to_text(program, instruction);
    for (std::size_t member = 1; instruction.kind == Instruction::Kind::Compute &&
                                 member < static_cast<std::size_t>(instruction.members);
         ++member)
      place.instruction += "|" + schedule::to_text(program.instructions[at + member].action);
    place.stage = instruction.action.stage();
    if (instruction.action.has_microbatch()) place.microbatch = *instruction.action.microbatch();
    place.kind = schedule::to_text(instruction.action.kind());
    if (place.state == State::Waiting)
      place.waits_for = {global(program.channels[static_cast<std::size_t>(instruction.channel)].from_rank)};
  }
  return place;
}

std::string encode_place(const RankPlace& place) {
  return to_json_value(place).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<RankPlace> decode_place(std::string_view text) {
  try {
    const Json value = Json::parse(text);
    RankPlace place;
    const auto name = value.at("state").get<std::string>();
    const auto state = std::find_if(std::begin(kStates), std::end(kStates),
                                    [&](State each) { return to_text(each) == name; });
    if (state == std::end(kStates)) return std::nullopt;
    place.state = *state;
    value.at("rank").get_to(place.rank);
    value.at("step").get_to(place.step);
    value.at("for_s").get_to(place.for_s);
    value.at("said_s_ago").get_to(place.said_s_ago);
    value.at("instruction").get_to(place.instruction);
    if (value.contains("stage")) place.stage = value.at("stage").get<int>();
    if (value.contains("microbatch")) place.microbatch = value.at("microbatch").get<int>();
    value.at("kind").get_to(place.kind);
    value.at("waits_for").get_to(place.waits_for);
    value.at("error").get_to(place.error);
    value.at("own_error").get_to(place.own_error);
    return place;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

StallCause find_cause(const std::vector<RankPlace>& places) {
  const Waits waits(places);
  const auto caused_by = [&](StallCause::Kind kind, std::vector<int> ranks) {
    return StallCause{kind, ranks, waits.held_up_by(ranks)};
  };
  const auto all = [&](auto wanted) {
    std::vector<int> ranks;
    for (const RankPlace& place : places)
      if (wanted(place)) ranks.push_back(place.rank);
    return ranks;
  };
  if (auto lost = all([](const RankPlace& place) { return place.state == State::Lost; }); !lost.empty())
    return caused_by(StallCause::Kind::LostRank, std::move(lost));
  // The first failure causes the others; if several are reported, any of them serves.
  if (auto failed = all([](const RankPlace& place) { return place.own_error; }); !failed.empty())
    return caused_by(StallCause::Kind::Failure, {failed.front()});
  if (auto cycle = waits.cycle(); !cycle.empty()) return caused_by(StallCause::Kind::Cycle, std::move(cycle));
  if (auto silent =
          all([](const RankPlace& place) { return place.state == State::NoStatus && place.error.empty(); });
      !silent.empty())
    return caused_by(StallCause::Kind::SilentRank, std::move(silent));
  // Among ranks that wait for nobody: the one that holds up most ranks, then the one that has been in its
  // place longest.
  StallCause best;
  double longest = 0;
  for (const RankPlace& place : places) {
    if (place.state != State::Computing && place.state != State::Between) continue;
    StallCause cause =
        caused_by(place.state == State::Computing ? StallCause::Kind::BusyRank : StallCause::Kind::AbsentRank,
                  {place.rank});
    if (cause.held_up.size() > best.held_up.size() ||
        (!cause.held_up.empty() && cause.held_up.size() == best.held_up.size() && place.for_s > longest)) {
      best = std::move(cause);
      longest = place.for_s;
    }
  }
  return best;
}

StallReport make_stall_report(int seen_from, std::vector<RankPlace> places) {
  StallCause cause = find_cause(places);
  return {seen_from, std::move(places), std::move(cause)};
}

std::string StallReport::text() const {
  const bool failed = cause.kind == StallCause::Kind::LostRank || cause.kind == StallCause::Kind::Failure;
  std::string text =
      fmt::format("pipeline {}, seen from rank {}\n", failed ? "step failed" : "stalled", seen_from);
  for (const RankPlace& place : places) text += fmt::format("  rank {}  {}\n", place.rank, to_text(place));
  return text + cause_text(*this);
}

std::string StallReport::to_json() const {
  Json ranks = Json::array();
  for (const RankPlace& place : places) ranks.push_back(to_json_value(place));
  const Json document = {{"seen_from", seen_from},
                         {"cause",
                          {{"kind", std::string(to_text(cause.kind))},
                           {"ranks", cause.ranks},
                           {"held_up", cause.held_up},
                           {"text", cause_text(*this)}}},
                         {"ranks", std::move(ranks)}};
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace penstock
