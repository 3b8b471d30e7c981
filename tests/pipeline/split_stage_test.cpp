// Captured stages whose backward is split into two graphs, under schedules that split the backward: the same
// bits as stages that run operator by operator, and less memory between the halves.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compiled_stage.h"
#include "penstock/step_context.h"
#include "tests/graph/weight_net.h"
#include "tests/pipeline/parity_check.h"
#include "tests/pipeline/parity_scenarios.h"
#include "tests/pipeline/split_backward_check.h"

namespace penstock {
namespace split_stage_test {

using namespace std::chrono_literals;
using schedule::ScheduleKind;
using test::Tensors;
using test::WeightNet;

unsigned programs() {
  const char* asked = std::getenv("PENSTOCK_RANDOM_PROGRAMS");
  return asked ? static_cast<unsigned>(std::stoul(asked)) : 60;
}

CompiledStageOptions in_two_graphs(std::vector<StageCapture>* captures = nullptr) {
  CompiledStageOptions options;
  options.compile.split_backward = true;
  if (captures) options.captured = [captures](const StageCapture& capture) { captures->push_back(capture); };
  return options;
}

// Holds the parameters of a net.
struct NetModuleImpl : torch::nn::Module {
  explicit NetModuleImpl(const std::shared_ptr<WeightNet>& net) {
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      register_parameter("weight" + std::to_string(i), net->parameters()[i],
                         net->parameters()[i].requires_grad());
  }
};

StageModule stage_of(const std::shared_ptr<WeightNet>& net) {
  return StageModule(
      [net](const Tree& args, const Tree&) {
        Tensors inputs;
        for (const Tree& each : args.entries()) inputs.push_back(each.tensor());
        std::vector<Tree> results;
        for (const at::Tensor& result : (*net)(inputs)) results.emplace_back(result);
        return Tree::tuple(std::move(results));
      },
      {std::make_shared<NetModuleImpl>(net)});
}

test::Forward forward_of(const StageModule& stage) {
  return [stage](const Tensors& inputs) {
    torch::manual_seed(29);
    const Tree result = stage.forward(Tree::tuple(std::vector<Tree>(inputs.begin(), inputs.end())), Tree());
    Tensors results;
    for (const Tree& each : result.entries()) results.push_back(each.tensor());
    return results;
  };
}

// The halves as a schedule runs them: I of a microbatch, W of the one before. With the bits of one graph.
TEST(SplitStage, RandomStagesInHalves) {
  int pending = 0, firsts = 0;
  for (unsigned seed = 0; seed < programs() && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const auto net = std::make_shared<WeightNet>(seed);
    std::vector<Tensors> microbatches;
    for (unsigned i = 0; i < 3; ++i) microbatches.push_back(net->inputs(i));
    const StageModule plain = stage_of(net);
    const test::Gradients wanted = test::run_way(test::Way::Autograd, forward_of(compiled_stage(plain)),
                                                 microbatches, net->parameters());
    std::vector<StageCapture> captures;
    const test::Forward fast = forward_of(compiled_stage(plain, in_two_graphs(&captures)));
    test::expect_same(wanted, test::run_way(test::Way::Autograd, fast, microbatches, net->parameters()),
                      "whole");
    test::expect_same(wanted, test::run_way(test::Way::AtOnce, fast, microbatches, net->parameters()),
                      "at once");
    const test::Gradients halves = test::run_way(test::Way::Halves, fast, microbatches, net->parameters());
    test::expect_same(wanted, halves, "in halves");
    ASSERT_EQ(captures.size(), 1u);
    // Whatever the graph defers, the second half computes, and nothing else.
    EXPECT_EQ(halves.pending, captures[0].deferred > 0 ? 3 : 0);
    pending += halves.pending > 0;
    firsts +=
        halves.pending > 0 && !microbatches[0][0].requires_grad() && !microbatches[0][1].requires_grad();
  }
  EXPECT_GE(pending * 2, static_cast<int>(programs()));
  EXPECT_GT(firsts, 2);
}

// Without the option a captured stage computes all gradients in the first half.
TEST(SplitStage, OneGraphLeavesNothingForTheSecondHalf) {
  const auto net = std::make_shared<WeightNet>(4);
  std::vector<Tensors> microbatches{net->inputs(0), net->inputs(1), net->inputs(2)};
  const test::Gradients halves = test::run_way(test::Way::Halves, forward_of(compiled_stage(stage_of(net))),
                                               microbatches, net->parameters());
  EXPECT_EQ(halves.pending, 0);
}

// Operators around a captured module: the module's graphs and those of autograd are split together.
TEST(SplitStage, AmongOtherOperators) {
  torch::manual_seed(3);
  torch::nn::Linear before(6, 6), after(6, 6);
  const auto net = std::make_shared<WeightNet>(12);
  const test::Forward inside = forward_of(compiled_stage(stage_of(net), in_two_graphs())),
                      plain = forward_of(stage_of(net));
  const auto around = [&](const test::Forward& middle) -> test::Forward {
    return [&, middle](const Tensors& in) {
      Tensors results = middle({before->forward(in[0]), in[1], in[2]});
      // The same weight again, outside of the graph.
      results[0] = torch::linear(after->forward(results[0]).tanh(), net->parameters()[0]);
      return results;
    };
  };
  Tensors weights = net->parameters();
  for (const auto& module : {before, after})
    for (const at::Tensor& each : module->parameters()) weights.push_back(each);
  std::vector<Tensors> microbatches;
  for (unsigned i = 0; i < 3; ++i) microbatches.push_back(net->inputs(i));
  const test::Gradients wanted = test::run_way(test::Way::Autograd, around(plain), microbatches, weights);
  for (const test::Way way : {test::Way::Autograd, test::Way::AtOnce, test::Way::Halves}) {
    const test::Gradients got = test::run_way(way, around(inside), microbatches, weights);
    test::expect_same(wanted, got, "way " + std::to_string(static_cast<int>(way)));
    if (way == test::Way::Halves) {
      EXPECT_EQ(got.pending, 3);
    }
  }
}

// ---- whole pipelines ----

// Stages of a scenario as graphs, or as they are. With names of the captures of all ranks.
test::Scenario as_graphs(test::Scenario scenario, const std::shared_ptr<std::vector<StageCapture>>& captures,
                         const std::shared_ptr<std::mutex>& mutex) {
  scenario.module = [plain = scenario.module, captures, mutex](int stage, int stages) {
    CompiledStageOptions options = in_two_graphs();
    options.captured = [captures, mutex](const StageCapture& capture) {
      const std::lock_guard lock(*mutex);
      captures->push_back(capture);
    };
    return compiled_stage(plain(stage, stages), options);
  };
  return scenario;
}

class SplitStages : public testing::TestWithParam<test::Layout> {};

TEST_P(SplitStages, HaveTheBitsOfPlainOnes) {
  const test::Layout layout = GetParam();
  for (const test::Scenario& scenario : test::parity_scenarios()) {
    // Rows that depend on values cannot be captured; one product for all microbatches is that of a layer.
    if (scenario.name == "shapes that depend on values" || scenario.name == "joined weight gradients")
      continue;
    SCOPED_TRACE(scenario.name);
    std::vector<test::Outcome> outcomes(2);
    const auto captures = std::make_shared<std::vector<StageCapture>>();
    const auto captures_mutex = std::make_shared<std::mutex>();
    for (const bool graphs : {false, true}) {
      std::mutex mutex;
      const test::Scenario used = graphs ? as_graphs(scenario, captures, captures_mutex) : scenario;
      comm::run_ranks(layout.ranks, 120s, [&](comm::World& world) {
        test::run_pipeline(world, used, layout, outcomes[graphs ? 1 : 0], mutex);
      });
    }
    EXPECT_FALSE(captures->empty());
    for (const StageCapture& capture : *captures)
      if (capture.nodes > 12) {
        EXPECT_GT(capture.deferred, 0u) << capture.nodes;
      }
    for (std::size_t step = 0; step < test::kSteps; ++step) {
      ASSERT_EQ(outcomes[1].losses[step].size(), outcomes[0].losses[step].size());
      for (std::size_t m = 0; m < outcomes[0].losses[step].size(); ++m)
        EXPECT_TRUE(at::equal(outcomes[1].losses[step][m], outcomes[0].losses[step][m])) << m;
      EXPECT_TRUE(at::equal(outcomes[1].outputs[step], outcomes[0].outputs[step]));
    }
    EXPECT_TRUE(at::equal(outcomes[1].evaluation, outcomes[0].evaluation));
    ASSERT_EQ(outcomes[1].gradients.size(), outcomes[0].gradients.size());
    for (const auto& [stage, wanted] : outcomes[0].gradients) {
      const std::vector<at::Tensor>& got = outcomes[1].gradients.at(stage);
      ASSERT_EQ(got.size(), wanted.size());
      for (std::size_t i = 0; i < wanted.size(); ++i)
        EXPECT_TRUE(test::same(got[i], wanted[i])) << "gradient " << i << " of stage " << stage;
    }
  }
}

std::vector<test::Layout> split_layouts() {
  std::vector<test::Layout> all;
  for (const ScheduleKind kind :
       {ScheduleKind::ZBVZeroBubble, ScheduleKind::InterleavedZeroBubble, ScheduleKind::VHalf,
        ScheduleKind::VMin, ScheduleKind::ZB2P, ScheduleKind::DualPipe, ScheduleKind::DualPipeV})
    all.push_back({kind, 2});
  all.push_back({ScheduleKind::ZBVZeroBubble, 4});
  all.push_back({ScheduleKind::DualPipeV, 4});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Schedules, SplitStages, testing::ValuesIn(split_layouts()),
                         [](const testing::TestParamInfo<test::Layout>& info) {
                           return std::string(schedule::to_text(info.param.kind)) + "On" +
                                  std::to_string(info.param.ranks);
                         });

}  // namespace split_stage_test
}  // namespace penstock
