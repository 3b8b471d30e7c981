// Stored graphs in training on a GPU: loaded from the cache folder and from an artifact.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "penstock/train/job/job.h"
#include "penstock/train/job/write_artifact.h"
#include "penstock/world.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace kept_graphs_gpu_test {

using namespace penstock::test;

std::vector<StepOutcome> train(const TrainConfig& config) {
  std::vector<StepOutcome> steps;
  comm::run_ranks(1, std::chrono::seconds(120), [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    job.validate();
    for (int step = 0; step < 3; ++step) steps.push_back(job.train_step());
  });
  return steps;
}

// Sums on a GPU need not have one order: the first loss comes before any of them.
void expect_same(const std::vector<StepOutcome>& ours, const std::vector<StepOutcome>& captured) {
  ASSERT_EQ(ours.size(), captured.size());
  EXPECT_EQ(ours[0].loss, captured[0].loss);
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_NEAR(ours[i].loss, captured[i].loss, 1e-4 * captured[i].loss);
}

void expect_loaded(const std::vector<StepOutcome>& steps, const std::string& source) {
  EXPECT_EQ(steps.at(0).loads, 2);
  EXPECT_EQ(steps[0].first_captures, 0);
  for (const CompiledForward& forward : steps[0].compiled) EXPECT_EQ(forward.source, source);
}

TEST(KeptGraphsGpu, AreLoadedInsteadOfCaptured) {
  for (const char* precision : {"fp32", "bf16"}) {
    SCOPED_TRACE(precision);
    const ScratchFolder folder;
    TrainConfig config =
        config_of({.name = "one"}, {"--compile", "graph", "--dropout", "0.1", "--precision", precision});
    config.layout.device = "cuda";
    const std::vector<StepOutcome> captured = train(config);
    EXPECT_EQ(captured.at(0).first_captures, 2);
    ::setenv("PENSTOCK_CACHE", (folder / "cache").c_str(), 1);
    expect_same(train(config), captured);
    const std::vector<StepOutcome> warm = train(config);
    ::unsetenv("PENSTOCK_CACHE");
    expect_same(warm, captured);
    expect_loaded(warm, "cache");
    EXPECT_EQ(write_artifact(config, folder / "artifact").graphs, 2u);
    config.training.artifact = (folder / "artifact").string();
    const std::vector<StepOutcome> prepared = train(config);
    expect_same(prepared, captured);
    expect_loaded(prepared, "artifact");
  }
}

}  // namespace kept_graphs_gpu_test
}  // namespace penstock::train
