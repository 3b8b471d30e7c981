#include "penstock/train/config/expert_overlap.h"

#include <fmt/format.h>

namespace penstock::train {
namespace {

using schedule::Action;
using schedule::ActionKind;

bool pairs_both(const schedule::Slot& slot) {
  bool forward = false, backward = false;
  for (const Action& action : slot) {
    forward |= action.kind() == ActionKind::Forward;
    backward |= action.kind() == ActionKind::Backward || action.kind() == ActionKind::BackwardInput;
  }
  return forward && backward;
}

}  // namespace

ExpertOverlap::ExpertOverlap(const LayoutConfig& layout, const schedule::Schedule& schedule)
    : schedule_(layout.schedule), experts_(layout.ep > 1), wanted_(layout.overlap_experts == "auto") {
  for (const schedule::Row& row : schedule.rows())
    for (const schedule::Slot slot : row) units_ += pairs_both(slot);
}

std::string ExpertOverlap::text() const {
  if (!experts_) return "";
  if (on())
    return fmt::format("exchanges of experts overlap with computation in {} units of {}", units_, schedule_);
  const std::string why = units_ == 0
                              ? schedule_ + " pairs no forward with a backward; DualPipeV and DualPipe do"
                              : "layout.overlap_experts = \"off\"";
  return "exchanges of experts do not overlap with computation: " + why;
}

}  // namespace penstock::train
