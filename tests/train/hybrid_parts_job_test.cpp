// Training hybrid models with mixtures of depths, multi-token prediction and experts balanced by a bias, in
// every layout compared with one process.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/load_model.h"
#include "penstock/train/job/run_folder.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace hybrid_parts_job_test {

using namespace std::chrono_literals;
using namespace penstock::test;

// The loss "balance" is not linear in the tokens, so that replicas would differ from one process.
const Options kBlocks = with(hybrid_blocks(), {"--balance_weight", "0", "--router_z_weight", "0.1"});

const Options kDepths = with(kBlocks, {"--depth_layers", "0,1,2", "--depth_capacity", "0.4", "--depth_kind",
                                       "gamma", "--depth_weight", "0.1", "--windows", "5"});
const Options kBias = with(kBlocks, {"--router_bias_rate", "0.002"});
const Options kMultiToken =
    with(kBlocks, {"--multi_token_depth", "2", "--multi_token_block", "A", "--tie_head", "true"});
// With a head of its own, so that the last stage has a copy of the embedding for the prediction alone.
const Options kAll = with(with(hybrid_blocks(), hybrid_losses()),
                          {"--balance_weight", "0", "--router_bias_rate", "0.002", "--tie_head", "false"});

TrainedJob train(const Layout& layout, const Options& options, JobRun run = {}) {
  run.validates = true;
  return train_job(layout, options, run);
}

void expect_same(const TrainedJob& ours, const TrainedJob& theirs) {
  EXPECT_EQ(ours.losses(), theirs.losses());
  expect_near_steps(ours, theirs, 0, 1e-9);
  EXPECT_EQ(ours.validation, theirs.validation);
  expect_equal_tensors(ours.buffers, theirs.buffers);
}

// Sums in another order: differences are float32 rounding only.
void expect_near(const TrainedJob& ours, const TrainedJob& theirs) {
  expect_near_steps(ours, theirs);
  expect_equal_tensors(ours.buffers, theirs.buffers);
}

struct Parts {
  std::string name;
  Options options;
};

class HybridPartsJob : public ::testing::TestWithParam<Parts> {};

TEST_P(HybridPartsJob, PipelinesGiveTheSameBits) {
  const Options& options = GetParam().options;
  const TrainedJob one = train({.name = "one"}, options);
  static const TrainedJob plain = train({.name = "one"}, kBlocks);
  EXPECT_NE(one.losses(), plain.losses());
  std::vector<Layout> layouts{{.name = "pp2", .pp = 2},
                              {.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"}};
  if (GetParam().name == "All") {
    layouts.push_back({.name = "pp4 GPipe", .pp = 4, .schedule = "GPipe"});
    layouts.push_back({.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"});
  }
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    expect_same(train(layout, options), one);
  }
}

TEST_P(HybridPartsJob, ReplicasShardsAndAccumulatedRunsAgreeWithOneProcess) {
  const Options& options = GetParam().options;
  const TrainedJob one = train({.name = "one", .microbatch_size = 4}, options);
  const auto near = [&](const Layout& layout, const Options& more = {}) {
    SCOPED_TRACE(layout.name);
    expect_near(train(layout, with(options, more)), one);
  };
  near({.name = "pp2 dp2", .pp = 2, .dp = 2});
  near({.name = "shard2", .dp = 2}, {"--shard", "2"});
  near({.name = "two runs", .pp = 2, .microbatch_size = 4, .accumulation = 2, .microbatches = 2});
}

// Also the shares that tensor-parallel ranks send from stage to stage.
TEST_P(HybridPartsJob, TensorParallelRanksAgreeWithOneProcess) {
  const TrainedJob one = train({.name = "one"}, GetParam().options);
  expect_near(train({.name = "tp2", .tp = 2}, GetParam().options), one);
  if (GetParam().name == "All")
    expect_near(train({.name = "pp2 tp2", .pp = 2, .tp = 2}, GetParam().options), one);
}

INSTANTIATE_TEST_SUITE_P(Parts, HybridPartsJob,
                         ::testing::Values(Parts{"Depths", kDepths},
                                           Parts{"MultiTokenWithATiedHead", kMultiToken},
                                           Parts{"Bias", kBias}, Parts{"All", kAll}),
                         [](const auto& info) { return info.param.name; });

TEST(HybridPartsCheckpoint, ContinuesUnderAnotherLayout) {
  const Layout writer{.name = "pp2 dp2", .pp = 2, .dp = 2}, one{.name = "one", .microbatch_size = 4};
  const TrainedJob whole = train(writer, kAll, {.steps = 5});
  for (const auto& [name, bias] : whole.buffers) EXPECT_GT(bias.abs().max().item<double>(), 0) << name;
  EXPECT_EQ(whole.buffers.size(), 3u);
  const ScratchFolder scratch;
  train(writer, kAll, {.steps = 3, .to = &scratch});
  const TrainedJob same = train(writer, kAll, {.steps = 5, .from = &scratch});
  EXPECT_EQ(same.losses(), whole.after(3).losses());
  expect_equal_tensors(same.buffers, whole.buffers);
  expect_near(train(one, kAll, {.steps = 5, .from = &scratch}), whole.after(3));
}

#ifdef PENSTOCK_HAVE_TOML
// A model that is loaded to generate has the buffers of the checkpoint.
TEST(HybridPartsCheckpoint, ALoadedModelHasItsBuffers) {
  const ScratchFolder scratch;
  const ResolvedConfig resolved = resolved_config_of({.name = "one"}, kAll);
  write_run_config(scratch.path(), resolved);
  const auto checkpoints = checkpoint_folder(resolved.config, scratch.path());
  NamedTensors expected;
  comm::run_ranks(1, 60s, [&](comm::World& world) {
    TrainingJob job(world, resolved.config, small_data().open(resolved.config));
    for (int step = 0; step < 3; ++step) job.train_step();
    checkpoint::CheckpointWriter saver(world, checkpoints);
    saver.save(job.steps_done(), job.contents());
    saver.wait();
    for (const models::StateBuffer& buffer : job.model().state_buffers())
      expected[buffer.name] = buffer.tensor.clone();
  });
  const LoadedModel loaded = load_model(scratch.path(), at::kCPU);
  ASSERT_EQ(loaded.model->state_buffers().size(), 3u);
  for (const models::StateBuffer& buffer : loaded.model->state_buffers()) {
    EXPECT_GT(buffer.tensor.abs().max().item<double>(), 0) << buffer.name;
    EXPECT_TRUE(at::equal(buffer.tensor, expected.at(buffer.name))) << buffer.name;
  }
}
#endif

TEST(HybridPartsPrecision, LowPrecision) {
  const TrainedJob full = train({.name = "pp2", .pp = 2}, kAll);
  const TrainedJob low = train({.name = "pp2", .pp = 2}, with(kAll, {"--precision", "bf16"}));
  const std::vector<double> expected = full.losses(), losses = low.losses();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NE(losses[i], expected[i]);
    EXPECT_NEAR(losses[i], expected[i], 0.02 * expected[i]);
  }
}

}  // namespace hybrid_parts_job_test
}  // namespace penstock::train
