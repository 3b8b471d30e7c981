// The predicted memory of a step through a graph against the measured one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/compile.h"
#include "penstock/graph/partition/activation_plan.h"
#include "penstock/graph/run/step_memory.h"
#include "penstock/torch/compat/cpu_memory.h"
#include "tests/graph/budget_model.h"

namespace penstock::graph {
namespace step_memory_test {

using namespace budget_model;

// Of a step of the compiled model, without its parameters and inputs; their gradients are part of it.
std::int64_t measured_peak(Model& model, const CompileOptions& options) {
  auto fast = compile(model, options);
  const at::Tensor x = input_of_model();
  std::int64_t peak = 0;
  for (int run = 0; run < 3; ++run) {
    for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    const std::int64_t before = cpu_memory().live;
    reset_cpu_peak();
    fast->forward(x).backward();
    peak = cpu_memory().peak - before;
  }
  return peak;
}

TEST(StepMemory, ThePredictedPeakIsTheMeasuredOne) {
  count_cpu_memory();
  Model model(4);
  const JointGraph joint = joint_of_model(4);
  std::int64_t largest = 0, smallest = 0;
  for (const char* budget : {"1", "0.7", "0.4", "0.2", "0"}) {
    SCOPED_TRACE(budget);
    const StepMemory step = memory_of_step(joint, plan_activations(joint, {.budget = budget}));
    // As it runs: with its passes, which the joint graph has gone through.
    const auto measured = static_cast<double>(measured_peak(model, with_budget(budget)));
    const auto predicted = static_cast<double>(step.peak_bytes());
    EXPECT_NEAR(predicted / measured, 1, 0.05) << predicted << " predicted, " << measured << " measured";
    if (std::string(budget) == "1") largest = step.peak_bytes();
    if (std::string(budget) == "0.2") smallest = step.peak_bytes();
  }
  EXPECT_LT(smallest, largest * 2 / 3);
}

TEST(StepMemory, TensorsAddUpToWhatIsLive) {
  const JointGraph joint = joint_of_model(2);
  for (const char* budget : {"1", "0.4"}) {
    const ActivationPlan plan = plan_activations(joint, {.budget = budget});
    const StepMemory step = memory_of_step(joint, plan);
    ASSERT_EQ(step.live.size(), step.nodes.size());
    std::vector<std::int64_t> sum(step.live.size(), 0);
    std::int64_t saved = 0;
    bool has_recomputed = false;
    for (const StepTensor& tensor : step.tensors) {
      for (std::size_t i = tensor.first; i <= tensor.last; ++i) sum[i] += tensor.bytes;
      saved += tensor.kind == StepTensor::Kind::Saved ? tensor.bytes : 0;
      has_recomputed |= tensor.kind == StepTensor::Kind::Recomputed;
    }
    // Results that are dropped at once are not listed; gradients of results exist from the loss on.
    std::size_t different = 0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      EXPECT_LE(sum[i], step.live[i]) << i;
      different += sum[i] != step.live[i] ? 1 : 0;
    }
    EXPECT_LT(different * 5, sum.size());
    EXPECT_EQ(saved, plan.bytes);
    EXPECT_EQ(has_recomputed, plan.cost > 0);
  }
}

}  // namespace step_memory_test
}  // namespace penstock::graph
