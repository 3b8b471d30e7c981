// Every schedule, on two and four ranks, equals one process: losses, outputs, gradients, evaluation,
// accumulation.
#include <gtest/gtest.h>

#include <mutex>

#include "tests/pipeline/parity_check.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace parity_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Layout;
using test::OneProcess;
using test::Outcome;
using test::Scenario;

class Parity : public testing::TestWithParam<Layout> {};

TEST_P(Parity, EqualsOneProcess) {
  const Layout layout = GetParam();
  const std::vector<Scenario> scenarios = test::parity_scenarios();
  std::vector<Outcome> outcomes(scenarios.size());
  std::mutex mutex;
  comm::run_ranks(layout.ranks, 120s, [&](comm::World& world) {
    for (std::size_t i = 0; i < scenarios.size(); ++i)
      test::run_pipeline(world, scenarios[i], layout, outcomes[i], mutex);
  });
  for (std::size_t i = 0; i < scenarios.size(); ++i) {
    SCOPED_TRACE(scenarios[i].name);
    test::expect_same(outcomes[i], OneProcess(scenarios[i], layout.parts()).run(layout.microbatches()),
                      layout);
  }
}

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const ScheduleKind kind : schedule::all_schedule_kinds())
    for (const int ranks : {2, 4}) all.push_back({kind, ranks});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Schedules, Parity, testing::ValuesIn(layouts()),
                         [](const testing::TestParamInfo<Layout>& info) {
                           std::string name(schedule::to_text(info.param.kind));
                           return name + "On" + std::to_string(info.param.ranks);
                         });

}  // namespace parity_test
}  // namespace penstock
