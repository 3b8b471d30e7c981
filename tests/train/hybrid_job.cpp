#include "tests/train/hybrid_job.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/dtensor.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/world.h"

namespace penstock::test {

Options with(Options options, const Options& more) {
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

const Options& hybrid_blocks() {
  static const Options options{"--pattern",
                               "AEME",
                               "--attention_feed",
                               "false",
                               "--experts",
                               "4",
                               "--expert_width",
                               "16",
                               "--state_size",
                               "4",
                               "--state_chunk",
                               "8",
                               "--state_head_width",
                               "8",
                               "--lr",
                               "0.01"};
  return options;
}

const Options& hybrid_losses() {
  static const Options options{"--router_z_weight",   "0.1", "--depth_layers",      "1,2",
                               "--multi_token_depth", "1",   "--multi_token_block", "E"};
  return options;
}

std::vector<double> TrainedJob::losses() const {
  std::vector<double> all;
  for (const train::StepOutcome& step : steps) all.push_back(step.loss);
  return all;
}

std::vector<double> TrainedJob::norms() const {
  std::vector<double> all;
  for (const train::StepOutcome& step : steps) all.push_back(step.grad_norm);
  return all;
}

TrainedJob TrainedJob::after(std::size_t count) const {
  TrainedJob rest = *this;
  rest.steps.erase(rest.steps.begin(), rest.steps.begin() + static_cast<std::ptrdiff_t>(count));
  return rest;
}

TrainedJob train_job(const Layout& layout, const Options& options, const JobRun& run) {
  using namespace std::chrono_literals;
  const train::TrainConfig config = config_of(layout, options);
  TrainedJob trained;
  std::mutex mutex;
  const auto keep = [&](NamedTensors& tensors, const std::string& name, const at::Tensor& tensor) {
    const std::lock_guard lock(mutex);
    const auto [at, is_new] = tensors.emplace(name, tensor.detach().clone());
    EXPECT_TRUE(is_new || at::equal(at->second, tensor)) << "copies differ in " << name;
  };
  comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
    const auto keep_local = [&](const std::string& name, const at::Tensor& tensor) {
      if (tensor.defined())
        keep(trained.local, std::to_string(world.rank()) + " " + name,
             is_dtensor(tensor) ? to_local(tensor) : tensor);
    };
    train::TrainingJob job(world, config, small_data().open(config));
    if (run.from != nullptr) {
      checkpoint::WorldAgreement agreement(world);
      job.load(checkpoint::open_latest(agreement, run.from->path())->checkpoint);
    }
    if (run.validates_first) job.validate();
    if (run.keeps.local)
      job.set_gradient_hook([&](const std::vector<optim::NamedParameter>& parameters) {
        for (const optim::NamedParameter& each : parameters)
          keep_local("gradient " + std::to_string(job.steps_done()) + " " + each.name, each.tensor.grad());
      });
    while (job.steps_done() < run.steps) {
      const train::StepOutcome outcome = job.train_step();
      if (world.rank() == 0) trained.steps.push_back(outcome);
    }
    job.set_gradient_hook({});
    if (run.validates) {
      const double loss = job.validate();
      if (world.rank() == 0) trained.validation = loss;
    }
    if (run.to != nullptr) {
      checkpoint::CheckpointWriter saver(world, run.to->path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    }
    for (const models::StateBuffer& buffer : job.model().state_buffers())
      keep(trained.buffers, buffer.name, buffer.tensor);
    for (const PipelineStage& stage : job.model().stages())
      for (const optim::NamedParameter& each : job.model().parameters_of(stage.index())) {
        if (run.keeps.local) keep_local(std::to_string(stage.index()) + " " + each.name, each.tensor);
        // "tied_embed" is the second use of a whole model.
        if (!run.keeps.parameters || each.name == "tied_embed") continue;
        keep(trained.parameters, each.name,
             is_dtensor(each.tensor) ? full_tensor(each.tensor.detach()) : each.tensor);
      }
  });
  return trained;
}

void expect_equal_tensors(const NamedTensors& ours, const NamedTensors& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (const auto& [name, tensor] : theirs) {
    ASSERT_TRUE(ours.contains(name)) << name;
    EXPECT_TRUE(at::equal(ours.at(name), tensor)) << name;
  }
}

void expect_near_tensors(const NamedTensors& ours, const NamedTensors& theirs, double tolerance) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (const auto& [name, tensor] : theirs) {
    ASSERT_TRUE(ours.contains(name)) << name;
    EXPECT_LT((ours.at(name) - tensor).abs().max().item<double>(),
              tolerance * tensor.abs().max().item<double>() + 1e-6)
        << name;
  }
}

void expect_near_steps(const TrainedJob& ours, const TrainedJob& theirs, double loss, double norm) {
  ASSERT_EQ(ours.steps.size(), theirs.steps.size());
  for (std::size_t i = 0; i < theirs.steps.size(); ++i) {
    const train::StepOutcome &mine = ours.steps[i], &other = theirs.steps[i];
    EXPECT_NEAR(mine.loss, other.loss, loss * other.loss) << "step " << other.step;
    EXPECT_NEAR(mine.grad_norm, other.grad_norm, norm * other.grad_norm) << "step " << other.step;
  }
}

}  // namespace penstock::test
