#include "penstock/lr_schedule.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::optim {

std::string to_string(Decay decay) {
  switch (decay) {
    case Decay::Constant:
      return "constant";
    case Decay::Cosine:
      return "cosine";
    case Decay::Linear:
      return "linear";
  }
  throw InvariantError("a decay without a name");
}

Decay parse_decay(std::string_view text) {
  for (const Decay decay : {Decay::Constant, Decay::Cosine, Decay::Linear})
    if (text == to_string(decay)) return decay;
  throw ValueError(describe("decay of the learning rate", fmt::format("\"{}\"", text),
                            "constant, cosine or linear", "use one of these names"));
}

void check(const LrSchedule& schedule) {
  if (!(schedule.peak > 0) || !std::isfinite(schedule.peak))
    throw ValueError(describe("learning rate: peak", fmt::format("{}", schedule.peak), "a positive number",
                              "common values are 1e-4 to 1e-2"));
  if (schedule.warmup_steps < 0)
    throw ValueError(describe("learning rate: warmup_steps", fmt::format("{}", schedule.warmup_steps),
                              "0 or more", "0 disables the warm-up"));
  if (schedule.decay == Decay::Constant) return;
  if (!(schedule.floor >= 0 && schedule.floor <= schedule.peak))
    throw ValueError(describe("learning rate: floor", fmt::format("{}", schedule.floor),
                              fmt::format("0 to the peak, {}", schedule.peak),
                              "a tenth of the peak is common"));
  if (schedule.total_steps <= schedule.warmup_steps)
    throw ValueError(
        describe("learning rate: total_steps", fmt::format("{}", schedule.total_steps),
                 fmt::format("more than warmup_steps, {}", schedule.warmup_steps),
                 "make the warm-up shorter or the run longer; only a constant rate needs no end"));
}

double lr_at(const LrSchedule& schedule, std::int64_t step) {
  check(schedule);
  if (step < 0)
    throw ValueError(
        describe("learning rate: step", fmt::format("{}", step), "0 or more", "the first step is 0"));
  if (step < schedule.warmup_steps)
    return schedule.peak * (static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps + 1));
  if (schedule.decay == Decay::Constant) return schedule.peak;
  if (step >= schedule.total_steps) return schedule.floor;
  const double done = static_cast<double>(step - schedule.warmup_steps) /
                      static_cast<double>(schedule.total_steps - schedule.warmup_steps);
  const double left =
      schedule.decay == Decay::Linear ? 1 - done : 0.5 * (1 + std::cos(std::numbers::pi * done));
  // In this form the ends are exact and rounding never exceeds them.
  return schedule.floor * (1 - left) + schedule.peak * left;
}

}  // namespace penstock::optim
