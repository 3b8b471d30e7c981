#include "penstock/action.h"

#include <fmt/format.h>

#include <charconv>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::schedule {

namespace {

void append_number(std::string& out, std::int32_t value) {
  char digits[12];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

void append_action(std::string& out, const Action& action) {
  append_number(out, action.stage());
  out += to_text(action.kind());
  if (const auto microbatch = action.microbatch()) append_number(out, *microbatch);
}

}  // namespace

void Action::out_of_range(int stage, int microbatch) {
  throw ValueError(
      describe("action", fmt::format("stage {}, microbatch {}", stage, microbatch),
               fmt::format("a stage from 0 to {} and a microbatch from 0 to {}", kMaxStage, kMaxMicrobatch)));
}

std::string_view to_text(ActionKind kind) {
  switch (kind) {
    case ActionKind::Forward:
      return "F";
    case ActionKind::Backward:
      return "B";
    case ActionKind::BackwardInput:
      return "I";
    case ActionKind::BackwardWeight:
      return "W";
    case ActionKind::SendForward:
      return "SEND_F";
    case ActionKind::RecvForward:
      return "RECV_F";
    case ActionKind::SendBackward:
      return "SEND_B";
    case ActionKind::RecvBackward:
      return "RECV_B";
    case ActionKind::Unshard:
      return "UNSHARD";
    case ActionKind::Reshard:
      return "RESHARD";
    case ActionKind::ReduceGrad:
      return "REDUCE_GRAD";
  }
  PENSTOCK_INVARIANT(false, "every action kind has a text");
}

void append_text(std::string& out, std::span<const Action> slot) {
  if (slot.empty()) return;
  if (slot.size() == 1) {
    append_action(out, slot[0]);
    return;
  }
  out += '(';
  for (std::size_t i = 0; i < slot.size(); ++i) {
    if (i > 0) out += ';';
    append_action(out, slot[i]);
  }
  out += ")OVERLAP_F_B";
}

std::string to_text(const Action& action) { return to_text(std::span(&action, 1)); }

std::string to_text(std::span<const Action> slot) {
  std::string out;
  append_text(out, slot);
  return out;
}

std::ostream& operator<<(std::ostream& out, const Action& action) { return out << to_text(action); }

}  // namespace penstock::schedule
