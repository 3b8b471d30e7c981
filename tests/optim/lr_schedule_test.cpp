// Learning-rate schedules: exact values and properties.
#include <gtest/gtest.h>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#endif

#include <cmath>
#include <limits>

#include "penstock/errors.h"
#include "penstock/lr_schedule.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::optim {
namespace lr_schedule_test {

using test::has_text;
using test::message_of;

TEST(LrSchedule, Values) {
  const LrSchedule linear{
      .peak = 1, .floor = 0.2, .warmup_steps = 3, .total_steps = 11, .decay = Decay::Linear};
  const double expected[] = {0.25, 0.5, 0.75, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2};
  for (int step = 0; step < 13; ++step) EXPECT_NEAR(lr_at(linear, step), expected[step], 1e-15) << step;
  const LrSchedule cosine{.peak = 2, .floor = 1, .warmup_steps = 0, .total_steps = 4, .decay = Decay::Cosine};
  const double wave[] = {2, 1.5 + std::sqrt(0.5) / 2, 1.5, 1.5 - std::sqrt(0.5) / 2, 1, 1};
  for (int step = 0; step < 6; ++step) EXPECT_NEAR(lr_at(cosine, step), wave[step], 1e-15) << step;
  const LrSchedule constant{.peak = 0.5, .warmup_steps = 1};
  EXPECT_EQ(lr_at(constant, 0), 0.25);
  EXPECT_EQ(lr_at(constant, 1), 0.5);
  EXPECT_EQ(lr_at(constant, 1'000'000'000'000), 0.5);
}

TEST(LrSchedule, EndsAreExact) {
  for (const Decay decay : {Decay::Cosine, Decay::Linear}) {
    const LrSchedule schedule{
        .peak = 3e-4, .floor = 3e-5, .warmup_steps = 100, .total_steps = 2000, .decay = decay};
    EXPECT_EQ(lr_at(schedule, 100), 3e-4);
    EXPECT_EQ(lr_at(schedule, 2000), 3e-5);
    EXPECT_EQ(lr_at(schedule, std::numeric_limits<std::int64_t>::max()), 3e-5);
    EXPECT_GT(lr_at(schedule, 1999), 3e-5);
  }
}

TEST(LrSchedule, ParsesNames) {
  for (const Decay decay : {Decay::Constant, Decay::Cosine, Decay::Linear})
    EXPECT_EQ(parse_decay(to_string(decay)), decay);
  EXPECT_TRUE(has_text(message_of<ValueError>([] { parse_decay("cosin"); }), "constant, cosine or linear"));
  EXPECT_THROW(parse_decay("Cosine"), ValueError);
  EXPECT_THROW(parse_decay(""), ValueError);
}

TEST(LrSchedule, BadInput) {
  const LrSchedule good{
      .peak = 1, .floor = 0.1, .warmup_steps = 2, .total_steps = 10, .decay = Decay::Linear};
  check(good);
  const auto refused = [&](auto change) {
    LrSchedule bad = good;
    change(bad);
    return message_of<ValueError>([&] { check(bad); });
  };
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  for (const double peak : {0.0, -1.0, nan, infinity})
    EXPECT_TRUE(has_text(refused([&](LrSchedule& s) { s.peak = peak; }), "peak"));
  for (const double floor : {-0.1, 1.5, nan})
    EXPECT_TRUE(has_text(refused([&](LrSchedule& s) { s.floor = floor; }), "floor"));
  EXPECT_TRUE(has_text(refused([](LrSchedule& s) { s.warmup_steps = -1; }), "warmup_steps"));
  EXPECT_TRUE(has_text(refused([](LrSchedule& s) { s.total_steps = 2; }), "total_steps"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { lr_at(good, -1); }), "step"));
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
TEST(LrScheduleProperty, RisesThenFallsWithinItsBounds) {
  ASSERT_TRUE(rc::check([] {
    const std::int64_t warmup = *rc::gen::inRange<std::int64_t>(0, 50),
                       total = warmup + *rc::gen::inRange<std::int64_t>(1, 200);
    const double peak = *rc::gen::inRange(1, 1000) / 1e4, floor = peak * (*rc::gen::inRange(0, 101) / 100.0);
    const LrSchedule schedule{.peak = peak,
                              .floor = floor,
                              .warmup_steps = warmup,
                              .total_steps = total,
                              .decay = *rc::gen::element(Decay::Constant, Decay::Cosine, Decay::Linear)};
    const double span = static_cast<double>(total - warmup);
    for (std::int64_t step = 0; step < total + 5; ++step) {
      const double lr = lr_at(schedule, step), next = lr_at(schedule, step + 1);
      RC_ASSERT(lr > 0 || (floor == 0 && step >= total));
      RC_ASSERT(lr <= peak);
      if (step < warmup) RC_ASSERT(next > lr);
      if (step < warmup)
        RC_ASSERT(std::abs(next - lr - peak / static_cast<double>(warmup + 1)) <
                  1e-12);  // no jump at the end of the warm-up
      if (step >= warmup) RC_ASSERT(next <= lr + 1e-15);
      if (step >= warmup) RC_ASSERT(lr - next <= 2 * (peak - floor) / span + 1e-12);
      if (step >= warmup && schedule.decay != Decay::Constant) RC_ASSERT(lr >= floor);
    }
    RC_ASSERT(lr_at(schedule, warmup) == peak);
    RC_ASSERT(lr_at(schedule, total) == (schedule.decay == Decay::Constant ? peak : floor));
  }));
}
#endif

}  // namespace lr_schedule_test
}  // namespace penstock::optim
