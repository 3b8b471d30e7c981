#include "penstock/generators.h"

#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/schedule/generate/shape_check.h"

namespace penstock::schedule {

namespace {

// An alias of a kind, or the name of a family without a generator.
struct OtherName {
  const char* name;
  std::optional<ScheduleKind> kind;
};
constexpr OtherName kOtherNames[] = {
    {"VPP", ScheduleKind::Interleaved1F1B},  {"ZB1P", ScheduleKind::InterleavedZeroBubble},
    {"ZBV", ScheduleKind::ZBVZeroBubble},    {"PipelineScheduleSingle", std::nullopt},
    {"PipelineScheduleMulti", std::nullopt},
};

// Lower case without separators: "interleaved_1f1b" and "Interleaved1F1B" are the same name.
std::string plain_name(std::string_view name) {
  std::string plain = to_lower(name);
  std::erase_if(plain, [](char c) { return c == '_' || c == '-'; });
  return plain;
}

bool in_reference(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::GPipe:
    case ScheduleKind::OneFOneB:
    case ScheduleKind::Interleaved1F1B:
    case ScheduleKind::LoopedBFS:
    case ScheduleKind::InterleavedZeroBubble:
    case ScheduleKind::ZBVZeroBubble:
    case ScheduleKind::DualPipeV:
      return true;
    case ScheduleKind::ZB2P:
    case ScheduleKind::VHalf:
    case ScheduleKind::VMin:
    case ScheduleKind::DualPipe:
      return false;
  }
  PENSTOCK_INVARIANT(false, "every schedule kind is known");
}

}  // namespace

Schedule generate(ScheduleKind kind, const PipelineShape& shape) {
  switch (kind) {
    case ScheduleKind::GPipe:
      return gpipe(shape);
    case ScheduleKind::OneFOneB:
      return one_f_one_b(shape);
    case ScheduleKind::Interleaved1F1B:
      return interleaved_1f1b(shape);
    case ScheduleKind::LoopedBFS:
      return looped_bfs(shape);
    case ScheduleKind::InterleavedZeroBubble:
      return interleaved_zero_bubble(shape);
    case ScheduleKind::ZBVZeroBubble:
      return zbv_zero_bubble(shape);
    case ScheduleKind::DualPipeV:
      return dual_pipe_v(shape);
    case ScheduleKind::ZB2P:
      return zb2p(shape);
    case ScheduleKind::VHalf:
      return v_half(shape);
    case ScheduleKind::VMin:
      return v_min(shape);
    case ScheduleKind::DualPipe:
      return dual_pipe(shape);
  }
  PENSTOCK_INVARIANT(false, "every schedule kind has a generator");
}

void check_shape(ScheduleKind kind, const PipelineShape& shape) {
  check_counts(kind, shape);
  switch (kind) {
    case ScheduleKind::GPipe:
      refuse_group_size(kind, shape);
      check_stages_per_rank(kind, shape, 1, "it has no chunks");
      return;
    case ScheduleKind::OneFOneB:
      refuse_group_size(kind, shape);
      check_stages_per_rank(kind, shape, 1, "it has no chunks");
      check_microbatches_at_least(kind, shape, shape.ranks, "one per stage, to fill the pipeline");
      return;
    case ScheduleKind::Interleaved1F1B:
    case ScheduleKind::InterleavedZeroBubble:
      (void)checked_group_size(kind, shape);
      return;
    case ScheduleKind::LoopedBFS:
      refuse_group_size(kind, shape);
      return;
    case ScheduleKind::ZB2P:
      refuse_group_size(kind, shape);
      check_stages_per_rank(kind, shape, 1, "it has no chunks");
      return;
    case ScheduleKind::ZBVZeroBubble:
    case ScheduleKind::VHalf:
    case ScheduleKind::VMin:
      refuse_group_size(kind, shape);
      check_stages_per_rank(kind, shape, 2, "one on each leg of the V");
      return;
    case ScheduleKind::DualPipeV:
      refuse_group_size(kind, shape);
      check_stages_per_rank(kind, shape, 2, "one on each leg of the V");
      check_microbatches_at_least(kind, shape, 2 * shape.ranks, "one per stage, to fill the pipeline");
      return;
    case ScheduleKind::DualPipe:
      refuse_group_size(kind, shape);
      check_stages_per_rank(kind, shape, 2, "one for each direction");
      if (shape.ranks % 2 != 0) {
        throw ValueError(describe("DualPipe: ranks", fmt::format("{}", shape.ranks),
                                  "an even number, as the two directions meet in the middle",
                                  "change the rank count or choose DualPipeV"));
      }
      check_microbatches_at_least(kind, shape, 2 * shape.ranks,
                                  "one per rank and direction, to fill the pipeline");
      if (shape.microbatches % 2 != 0) {
        throw ValueError(describe("DualPipe: microbatches", fmt::format("{}", shape.microbatches),
                                  "an even number, half of them for each direction"));
      }
      return;
  }
  PENSTOCK_INVARIANT(false, "every schedule kind has a shape check");
}

StagePlacement placement_of(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::GPipe:
    case ScheduleKind::OneFOneB:
    case ScheduleKind::Interleaved1F1B:
    case ScheduleKind::LoopedBFS:
    case ScheduleKind::InterleavedZeroBubble:
    case ScheduleKind::ZB2P:
      return StagePlacement::Loop;
    case ScheduleKind::ZBVZeroBubble:
    case ScheduleKind::DualPipeV:
    case ScheduleKind::VHalf:
    case ScheduleKind::VMin:
      return StagePlacement::V;
    case ScheduleKind::DualPipe:
      return StagePlacement::Bidirectional;
  }
  PENSTOCK_INVARIANT(false, "every schedule kind has a placement");
}

std::optional<int> required_stages_per_rank(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::GPipe:
    case ScheduleKind::OneFOneB:
    case ScheduleKind::ZB2P:
      return 1;
    case ScheduleKind::Interleaved1F1B:
    case ScheduleKind::LoopedBFS:
    case ScheduleKind::InterleavedZeroBubble:
      return std::nullopt;
    case ScheduleKind::ZBVZeroBubble:
    case ScheduleKind::DualPipeV:
    case ScheduleKind::VHalf:
    case ScheduleKind::VMin:
    case ScheduleKind::DualPipe:
      return 2;
  }
  PENSTOCK_INVARIANT(false, "every schedule kind is known");
}

int default_stages_per_rank(ScheduleKind kind) { return required_stages_per_rank(kind).value_or(2); }

const std::vector<ScheduleKind>& all_schedule_kinds() {
  static const std::vector<ScheduleKind> kinds = {ScheduleKind::GPipe,
                                                  ScheduleKind::OneFOneB,
                                                  ScheduleKind::Interleaved1F1B,
                                                  ScheduleKind::LoopedBFS,
                                                  ScheduleKind::InterleavedZeroBubble,
                                                  ScheduleKind::ZBVZeroBubble,
                                                  ScheduleKind::DualPipeV,
                                                  ScheduleKind::ZB2P,
                                                  ScheduleKind::VHalf,
                                                  ScheduleKind::VMin,
                                                  ScheduleKind::DualPipe};
  return kinds;
}

std::string_view to_text(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::GPipe:
      return "GPipe";
    case ScheduleKind::OneFOneB:
      return "1F1B";
    case ScheduleKind::Interleaved1F1B:
      return "Interleaved1F1B";
    case ScheduleKind::LoopedBFS:
      return "LoopedBFS";
    case ScheduleKind::InterleavedZeroBubble:
      return "InterleavedZeroBubble";
    case ScheduleKind::ZBVZeroBubble:
      return "ZBVZeroBubble";
    case ScheduleKind::DualPipeV:
      return "DualPipeV";
    case ScheduleKind::ZB2P:
      return "ZB2P";
    case ScheduleKind::VHalf:
      return "VHalf";
    case ScheduleKind::VMin:
      return "VMin";
    case ScheduleKind::DualPipe:
      return "DualPipe";
  }
  PENSTOCK_INVARIANT(false, "every schedule kind has a name");
}

ScheduleName resolve_schedule_name(std::string_view name) {
  const std::string lower = plain_name(name);
  std::vector<std::string> names;
  for (const ScheduleKind kind : all_schedule_kinds()) {
    names.emplace_back(to_text(kind));
    if (plain_name(names.back()) == lower)
      return {names.back(), kind, in_reference(kind) && to_lower(names.back()) == to_lower(name)};
  }
  for (const OtherName& other : kOtherNames) {
    if (plain_name(other.name) != lower) continue;
    if (!other.kind) return {other.name, std::nullopt, to_lower(other.name) == to_lower(name)};
    return {std::string(to_text(*other.kind)), other.kind, false};
  }
  std::string expected;
  for (const std::string& known : names) expected += (expected.empty() ? "one of " : ", ") + known;
  const std::string nearest = nearest_name(name, names);
  throw ValueError(describe("schedule name", fmt::format("\"{}\"", name), expected,
                            nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
}

ScheduleKind schedule_kind(std::string_view name) {
  const ScheduleName resolved = resolve_schedule_name(name);
  if (resolved.kind) return *resolved.kind;
  throw ValueError(describe("schedule name", resolved.name, "a schedule that can be generated",
                            "this family takes its rows from a file; read one or choose a schedule by name"));
}

}  // namespace penstock::schedule
