#include "penstock/torch/random/unit_half.h"

#include <utility>

#include "penstock/step_context.h"
#include "penstock/torch/random/step_info.h"

namespace penstock {

std::shared_ptr<UnitHalf> UnitHalf::current() {
  const detail::StepInfo* info = detail::current_step_info();
  return info == nullptr ? nullptr : info->half;
}

UnitHalfGuard::UnitHalfGuard(std::shared_ptr<UnitHalf> half)
    : guard_(detail::step_info_kind(), [&] {
        const detail::StepInfo* outer = detail::current_step_info();
        return std::make_shared<detail::StepInfo>(StepContext::current(), std::move(half),
                                                  outer != nullptr && outer->any_rows);
      }()) {}

}  // namespace penstock
