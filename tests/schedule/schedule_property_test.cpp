// Properties of every schedule for random legal shapes.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>

#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/lower.h"
#include "penstock/schedule.h"
#include "penstock/schedule/check/dry_run.h"
#include "penstock/schedule/generate/virtual_pipeline.h"
#include "penstock/validate.h"

namespace penstock::schedule {
namespace schedule_property_test {

struct Case {
  ScheduleKind kind;
  PipelineShape shape;
};

std::ostream& operator<<(std::ostream& out, const Case& item) {
  out << to_text(item.kind) << " P=" << item.shape.ranks << " V=" << item.shape.stages_per_rank
      << " M=" << item.shape.microbatches;
  if (item.shape.group_size) out << " G=" << *item.shape.group_size;
  return out;
}

bool is_legal(const Case& item) {
  try {
    check_shape(item.kind, item.shape);
    return true;
  } catch (const ValueError&) {
    return false;
  }
}

Case legal_case(const std::vector<ScheduleKind>& kinds) {
  const auto any_case = rc::gen::exec([kinds] {
    Case item{*rc::gen::elementOf(kinds), {}};
    item.shape.ranks = *rc::gen::inRange(1, 13);
    item.shape.stages_per_rank = required_stages_per_rank(item.kind).value_or(*rc::gen::inRange(1, 5));
    item.shape.microbatches = *rc::gen::inRange(1, 49);
    const bool grouped =
        item.kind == ScheduleKind::Interleaved1F1B || item.kind == ScheduleKind::InterleavedZeroBubble;
    if (grouped && *rc::gen::arbitrary<bool>()) item.shape.group_size = *rc::gen::inRange(1, 20);
    return item;
  });
  return *rc::gen::suchThat(any_case, is_legal);
}

// Maximum number of chunks held at once on each rank, by counting.
std::vector<int> held_chunks(const Schedule& schedule) {
  std::vector<int> result;
  for (const Row& row : schedule.rows()) {
    int held = 0;
    int most = 0;
    for (const Slot slot : row) {
      for (const Action& action : slot) {
        if (action.kind() == ActionKind::Forward) most = std::max(most, ++held);
      }
      for (const Action& action : slot) {
        if (produces_weight_gradient(action.kind())) --held;
      }
    }
    EXPECT_EQ(held, 0);
    result.push_back(most);
  }
  return result;
}

// Idle steps of each rank between its first and its last action when F, I and W take one step each and B two.
std::vector<int> idle_within_span(const Schedule& schedule) {
  const StageMap& map = schedule.stages();
  std::map<std::tuple<bool, int, int>, int> made;
  std::vector<std::size_t> next(static_cast<std::size_t>(map.ranks()), 0);
  std::vector<int> clock(next.size(), 0);
  std::vector<int> start(next.size(), -1);
  std::vector<int> busy(next.size(), 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < map.ranks(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      for (; next[r] < schedule.row(rank).size(); ++next[r]) {
        const Slot slot = schedule.row(rank)[next[r]];
        int begin = clock[r];
        int length = 0;
        bool ready = true;
        for (const Action& action : slot) {
          const int stage = action.stage();
          length += action.kind() == ActionKind::Backward ? 2 : 1;
          const bool is_forward = action.kind() == ActionKind::Forward;
          const bool needs = is_forward
                                 ? !map.is_first(action.stage())
                                 : produces_input_gradient(action.kind()) && !map.is_last(action.stage());
          if (!needs) continue;
          const auto found =
              made.find({is_forward, is_forward ? stage - 1 : stage + 1, *action.microbatch()});
          if (found == made.end()) {
            ready = false;
          } else {
            begin = std::max(begin, found->second);
          }
        }
        if (!ready) break;
        progress = true;
        if (slot.empty()) continue;
        if (start[r] < 0) start[r] = begin;
        clock[r] = begin + length;
        busy[r] += length;
        for (const Action& action : slot) {
          if (action.kind() == ActionKind::BackwardWeight) continue;
          made[{action.kind() == ActionKind::Forward, action.stage(), *action.microbatch()}] = clock[r];
        }
      }
    }
  }
  std::vector<int> idle;
  for (std::size_t r = 0; r < next.size(); ++r) idle.push_back(clock[r] - start[r] - busy[r]);
  return idle;
}

RC_GTEST_PROP(EverySchedule, ValidatesLowersAndRunsWithoutDeadlock, ()) {
  const Case item = legal_case(all_schedule_kinds());
  const Schedule schedule = generate(item.kind, item.shape);
  const Report report = check(schedule);
  if (!report.ok()) RC_FAIL(report.text());

  LowerOptions options;
  options.max_active_stages = *rc::gen::inRange(1, 5);
  const Schedule lowered = lower(schedule, options);
  const Report lowered_report = check(lowered);
  if (!lowered_report.ok()) RC_FAIL(lowered_report.text());
  RC_ASSERT(without_idle(dry_run(lowered)) == lowered);
  RC_ASSERT(without_idle(dry_run(schedule)) == without_idle(schedule));

  options.defer_receives = true;
  const Schedule deferred = lower(schedule, options);
  ValidateOptions posted;
  posted.sends = SendModel::Posted;
  const Report deferred_report = check(deferred, posted);
  if (!deferred_report.ok()) RC_FAIL(deferred_report.text());
  RC_ASSERT(without_idle(dry_run(deferred)) == deferred);
  RC_ASSERT(deferred.actions() == lowered.actions());
}

RC_GTEST_PROP(EverySchedule, RoundTripsThroughText, ()) {
  const Case item = legal_case(all_schedule_kinds());
  const Schedule schedule = generate(item.kind, item.shape);
  RC_ASSERT(parse_schedule(to_csv(schedule), placement_of(item.kind)) == schedule);
  const Schedule lowered = lower(schedule);
  RC_ASSERT(parse_schedule(to_csv(lowered), placement_of(item.kind)) == lowered);
}

RC_GTEST_PROP(EveryRow, RoundTripsThroughText, ()) {
  std::vector<Row> rows(static_cast<std::size_t>(*rc::gen::inRange(1, 4)));
  for (Row& row : rows) {
    const int slots = *rc::gen::inRange(0, 6);
    for (int i = 0; i < slots; ++i) {
      std::vector<Action> members;
      const int count = *rc::gen::inRange(0, 4);
      for (int k = 0; k < count; ++k) {
        const auto kind = static_cast<ActionKind>(*rc::gen::inRange(0, kActionKinds));
        const int stage = *rc::gen::inRange(0, kMaxStage);
        if (*rc::gen::arbitrary<bool>()) {
          members.emplace_back(kind, stage, *rc::gen::inRange(0, kMaxMicrobatch));
        } else {
          members.emplace_back(kind, stage);
        }
      }
      row.push_slot(members);
    }
  }
  RC_ASSERT(parse_rows(to_csv(rows)) == rows);
}

// Maximum number of chunks that a rank holds, from the table in generators.h.
int held_at_most(const Case& item, int rank) {
  const int ranks = item.shape.ranks;
  const int chunks = item.shape.stages_per_rank;
  const int microbatches = item.shape.microbatches;
  const int group =
      std::min(microbatches, item.shape.group_size.value_or(microbatches_per_round(microbatches, ranks)));
  switch (item.kind) {
    case ScheduleKind::GPipe:
      return microbatches;
    case ScheduleKind::OneFOneB:
      return ranks - rank;
    case ScheduleKind::Interleaved1F1B:
      return 2 * (ranks - 1 - rank) + (chunks - 1) * group + 1;
    case ScheduleKind::LoopedBFS:
      return microbatches * chunks;
    case ScheduleKind::InterleavedZeroBubble:
      return (chunks - 1) * group + ranks;
    case ScheduleKind::ZBVZeroBubble:
      return 2 * ranks;
    case ScheduleKind::DualPipeV:
      return 2 * ranks + 1;
    case ScheduleKind::ZB2P:
      return 2 * ranks - 1;
    case ScheduleKind::VHalf:
      return ranks + 2;
    case ScheduleKind::VMin:
      return (2 * ranks + 8) / 3;
    case ScheduleKind::DualPipe:
      return ranks + 1;
  }
  return 0;
}

RC_GTEST_PROP(BoundedMemory, HoldsWhatTheTableSays, ()) {
  const Case item = legal_case(all_schedule_kinds());
  const std::vector<int> held = held_chunks(generate(item.kind, item.shape));
  for (std::size_t rank = 0; rank < held.size(); ++rank) {
    RC_ASSERT(held[rank] <= held_at_most(item, static_cast<int>(rank)));
    RC_ASSERT(held[rank] <= item.shape.microbatches * item.shape.stages_per_rank);
  }
}

RC_GTEST_PROP(Bubbles, Zb2pLeavesNoGap, ()) {
  const Case item = legal_case({ScheduleKind::ZB2P});
  const Schedule schedule = generate(item.kind, item.shape);
  if (item.shape.microbatches >= 2 * item.shape.ranks - 1) {
    for (const int idle : idle_within_span(schedule)) RC_ASSERT(idle == 0);
  }
}

RC_GTEST_PROP(Bubbles, ZbvLeavesNoGap, ()) {
  const Case item = legal_case({ScheduleKind::ZBVZeroBubble});
  const Schedule schedule = generate(item.kind, item.shape);
  if (item.shape.microbatches >= 2 * item.shape.ranks) {
    for (const int idle : idle_within_span(schedule)) RC_ASSERT(idle == 0);
  }
}

// The published table of DualPipe: (P/2 - 1)(F&B + B - 3W) steps of bubble.
RC_GTEST_PROP(Bubbles, DualPipeMatchesItsTable, ()) {
  const Case item = legal_case({ScheduleKind::DualPipe});
  const Schedule schedule = generate(item.kind, item.shape);
  for (const int idle : idle_within_span(schedule))
    RC_ASSERT(idle <= (item.shape.ranks / 2 - 1) * (3 + 2 - 3));
}

}  // namespace schedule_property_test
}  // namespace penstock::schedule
