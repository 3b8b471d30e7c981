// Runs a scenario through a pipeline and in one process and compares losses, outputs, gradients, evaluation
// and accumulation.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/pipeline.h"
#include "penstock/pipeline/stage/stage_state.h"
#include "penstock/simulator.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock::test {

using schedule::ScheduleKind;

inline constexpr int kSteps = 2;

struct Outcome {
  std::vector<std::vector<at::Tensor>> losses;  // by step
  std::vector<at::Tensor> outputs;
  at::Tensor evaluation;
  std::map<int, std::vector<at::Tensor>> gradients;  // by part of the model; undefined where there is none
};

inline std::vector<at::Tensor> gradients_of(const StageModule& module) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : module.parameters())
    found.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  return found;
}

// Runs the stages one after the other, microbatch by microbatch. Gradients of all steps accumulate.
class OneProcess {
 public:
  OneProcess(const Scenario& scenario, int stages) : scenario_(scenario), skips_(scenario.skips(stages)) {
    for (int stage = 0; stage < stages; ++stage) modules_.push_back(scenario.module(stage, stages));
  }

  Tree forward(const Tree& args, const Tree& kwargs) const {
    Tree value = args;
    std::map<std::size_t, at::Tensor> skipped;
    for (int stage = 0; stage < static_cast<int>(modules_.size()); ++stage) {
      std::vector<Tree> inputs = stage == 0 ? args.entries() : std::vector<Tree>();
      if (stage > 0)
        for (const at::Tensor& tensor : stage_outputs(value, stage)) inputs.emplace_back(tensor);
      for (std::size_t k = 0; k < skips_.size(); ++k)
        if (skips_[k].to == stage) inputs.emplace_back(skipped.at(k));
      value = modules_[static_cast<std::size_t>(stage)].forward(
          Tree::tuple(inputs), modules_[static_cast<std::size_t>(stage)].takes_kwargs() ? kwargs : Tree());
      std::vector<std::size_t> leaving;
      for (std::size_t k = 0; k < skips_.size(); ++k)
        if (skips_[k].from == stage) leaving.push_back(k);
      if (leaving.empty()) continue;
      std::vector<at::Tensor> outputs = stage_outputs(value, stage);
      for (std::size_t i = 0; i < leaving.size(); ++i)
        skipped[leaving[i]] = outputs[outputs.size() - leaving.size() + i];
      outputs.resize(outputs.size() - leaving.size());
      value = Tree::tuple(std::vector<Tree>(outputs.begin(), outputs.end()));
    }
    return value;
  }

  Outcome run(int microbatches) {
    Outcome outcome;
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = scenario_.batch(step, microbatches);
      const Microbatches parts = split_microbatches(batch.args, batch.kwargs, microbatches);
      const std::vector<Tree> targets = split_tree(batch.target, microbatches);
      std::vector<std::vector<at::Tensor>> before;
      for (const StageModule& module : modules_) {
        before.push_back(gradients_of(module));
        for (const at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
      }
      auto& losses = outcome.losses.emplace_back();
      std::vector<Tree> outputs;
      for (std::size_t m = 0; m < parts.count(); ++m) {
        const Tree output = forward(parts.args[m], parts.kwargs[m]);
        const at::Tensor loss = scenario_.loss(output, targets[m]);
        loss.backward();
        losses.push_back(loss.detach());
        outputs.emplace_back(output.tensor().detach());
      }
      outcome.outputs.push_back(merge_microbatches(outputs).tensor());
      const at::NoGradGuard no_grad;
      for (std::size_t s = 0; s < modules_.size(); ++s) {
        const std::vector<at::Tensor> parameters = modules_[s].parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          at::Tensor& gradient = parameters[i].mutable_grad();
          if (gradient.defined()) gradient.div_(microbatches);
          if (gradient.defined() && before[s][i].defined()) gradient.add_(before[s][i]);
        }
      }
    }
    const at::NoGradGuard no_grad;
    const Batch batch = scenario_.batch(kSteps, microbatches);
    const Microbatches parts = split_microbatches(batch.args, batch.kwargs, microbatches);
    std::vector<Tree> outputs;
    for (std::size_t m = 0; m < parts.count(); ++m)
      outputs.push_back(forward(parts.args[m], parts.kwargs[m]));
    outcome.evaluation = merge_microbatches(outputs).tensor();
    for (std::size_t s = 0; s < modules_.size(); ++s)
      outcome.gradients[static_cast<int>(s)] = gradients_of(modules_[s]);
    return outcome;
  }

 private:
  const Scenario& scenario_;
  std::vector<SkipTensor> skips_;
  std::vector<StageModule> modules_;
};

struct Layout {
  ScheduleKind kind;
  int ranks;
  int stages_per_rank() const { return schedule::required_stages_per_rank(kind).value_or(2); }
  int microbatches() const { return 2 * ranks; }
  // Both copies of a bidirectional pipeline are stages.
  int stages() const { return ranks * stages_per_rank(); }
  int parts() const { return kind == ScheduleKind::DualPipe ? ranks : stages(); }
};

// Runs the scenario on this rank; every rank adds its part to `outcome`.
inline void run_pipeline(comm::World& world, const Scenario& scenario, const Layout& layout, Outcome& outcome,
                         std::mutex& mutex) {
  const auto kind = layout.kind;
  const schedule::Schedule whole = schedule::generate(kind, {.ranks = layout.ranks,
                                                             .stages_per_rank = layout.stages_per_rank(),
                                                             .microbatches = layout.microbatches(),
                                                             .group_size = {}});
  std::vector<PipelineStage> stages;
  for (const int index : whole.stages().stages_of(world.rank()))
    stages.emplace_back(scenario.module(index % layout.parts(), layout.parts()), index, layout.stages(),
                        at::kCPU, scenario.options(index % layout.parts(), layout.parts()));
  PipelineOptions options{world};
  for (SkipTensor skip : scenario.skips(layout.parts()))
    for (int chain = 0; chain < layout.stages() / layout.parts(); ++chain)
      options.skips.push_back(
          {skip.name, skip.from + chain * layout.parts(), skip.to + chain * layout.parts()});
  PipelineRuntime pipeline(stages, whole, scenario.loss, options);
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = scenario.batch(step, layout.microbatches());
    const StepResult result = pipeline.step(batch.args, batch.kwargs, batch.target);
    // Measured: as many microbatches in flight as the simulator predicts.
    EXPECT_EQ(pipeline.report().peak_live_microbatches, plan::simulate(pipeline.schedule(), plan::CostModel{})
                                                            .ranks[static_cast<std::size_t>(world.rank())]
                                                            .peak_activations);
    const std::lock_guard lock(mutex);
    outcome.losses.resize(kSteps);
    outcome.outputs.resize(kSteps);
    auto& losses = outcome.losses[static_cast<std::size_t>(step)];
    at::Tensor& output = outcome.outputs[static_cast<std::size_t>(step)];
    // In a bidirectional pipeline rank 0 holds the last stage of the second half of the microbatches.
    const bool second_half = kind == ScheduleKind::DualPipe && world.rank() == 0;
    losses.insert(second_half ? losses.end() : losses.begin(), result.losses.begin(), result.losses.end());
    if (result.output)
      output = !output.defined() ? result.output->tensor()
                                 : at::cat(second_half ? std::vector{output, result.output->tensor()}
                                                       : std::vector{result.output->tensor(), output});
  }
  const Batch batch = scenario.batch(kSteps, layout.microbatches());
  const StepResult result = pipeline.eval(batch.args, batch.kwargs);
  const std::lock_guard lock(mutex);
  if (result.output) {
    const bool second_half = kind == ScheduleKind::DualPipe && world.rank() == 0;
    at::Tensor& output = outcome.evaluation;
    output = !output.defined() ? result.output->tensor()
                               : at::cat(second_half ? std::vector{output, result.output->tensor()}
                                                     : std::vector{result.output->tensor(), output});
  }
  for (const PipelineStage& stage : stages) outcome.gradients[stage.index()] = gradients_of(stage.module());
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!expected.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-6 + 1e-5 * expected.abs().max().item<double>())
      << what;
}

// Bitwise except for gradients; or all within a tolerance, where received data may be summed in another
// order.
inline void expect_same(const Outcome& actual, const Outcome& expected, const Layout& layout,
                        bool exact = true) {
  const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && (exact ? a.equal(b) : at::allclose(a, b, 1e-10, 1e-10));
  };
  for (std::size_t step = 0; step < kSteps; ++step) {
    ASSERT_EQ(actual.losses[step].size(), expected.losses[step].size());
    for (std::size_t m = 0; m < expected.losses[step].size(); ++m)
      EXPECT_TRUE(same(actual.losses[step][m], expected.losses[step][m]))
          << "loss " << m << " of step " << step;
    EXPECT_TRUE(same(actual.outputs[step], expected.outputs[step])) << "output of step " << step;
  }
  EXPECT_TRUE(same(actual.evaluation, expected.evaluation)) << "evaluation";
  // The schedule determines the order of microbatches in the sums.
  for (const auto& [stage, gradients] : actual.gradients) {
    const auto& wanted = expected.gradients.at(stage % layout.parts());
    ASSERT_EQ(gradients.size(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i)
      expect_close(gradients[i], wanted[i],
                   "gradient " + std::to_string(i) + " of stage " + std::to_string(stage));
  }
}

}  // namespace penstock::test
