// Two hundred steps with schedules, shapes and evaluations chosen at random, in one world: nothing leaks from
// one step into the next.
#include <gtest/gtest.h>

#include <random>

#include "penstock/pipeline.h"
#include "tests/pipeline/soak.h"

namespace penstock {
namespace soak_test {

using namespace std::chrono_literals;

TEST(Soak, TwoHundredStepsInAWorldOfThreads) {
  comm::run_ranks(2, 240s, [](comm::World& world) { EXPECT_EQ(test::soak(world, 200, 11), ""); });
}

TEST(Soak, FourRanks) {
  comm::run_ranks(4, 240s, [](comm::World& world) { EXPECT_EQ(test::soak(world, 50, 12), ""); });
}

}  // namespace soak_test
}  // namespace penstock
