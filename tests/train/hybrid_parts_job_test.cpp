// Training hybrid models with mixtures of depths, multi-token prediction and experts balanced by a bias, in
// every layout compared with one process.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/load_model.h"
#include "penstock/train/job/run_folder.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace hybrid_parts_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::Layout;
using penstock::test::ScratchFolder;
using penstock::test::small_data;

using Options = std::vector<std::string>;

// The loss "balance" is not linear in the tokens, so that replicas would differ from one process.
const Options kBlocks = {"--pattern",
                         "AEME",
                         "--attention_feed",
                         "false",
                         "--experts",
                         "4",
                         "--lr",
                         "0.01",
                         "--expert_width",
                         "16",
                         "--state_size",
                         "4",
                         "--state_head_width",
                         "8",
                         "--state_chunk",
                         "8",
                         "--balance_weight",
                         "0",
                         "--router_z_weight",
                         "0.1"};

Options with(const Options& more) {
  Options all = kBlocks;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

const Options kDepths = with({"--depth_layers", "0,1,2", "--depth_capacity", "0.4", "--depth_kind", "gamma",
                              "--depth_weight", "0.1", "--windows", "5"});
const Options kBias = with({"--router_bias_rate", "0.002"});
const Options kMultiToken =
    with({"--multi_token_depth", "2", "--multi_token_block", "A", "--tie_head", "true"});
// With a head of its own, so that the last stage has a copy of the embedding for the prediction alone.
const Options kAll = with({"--depth_layers", "1,2", "--router_bias_rate", "0.002", "--multi_token_depth", "1",
                           "--multi_token_block", "E", "--tie_head", "false"});

struct Outcome {
  std::vector<double> losses, norms;
  double validation = 0;
  std::map<std::string, at::Tensor> buffers;  // of all stages
};

struct Run {
  int steps = 3;
  const ScratchFolder* from = nullptr;  // continues its newest checkpoint
  const ScratchFolder* to = nullptr;    // saves the last state
};

Outcome train(const Layout& layout, const Options& options, const Run& run = {}) {
  const TrainConfig config = config_of(layout, options);
  Outcome seen;
  std::mutex mutex;
  comm::run_ranks(layout.pp * layout.dp * layout.tp, 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    if (run.from != nullptr) {
      checkpoint::WorldAgreement agreement(world);
      job.load(checkpoint::open_latest(agreement, run.from->path())->checkpoint);
    }
    while (job.steps_done() < run.steps) {
      const StepOutcome outcome = job.train_step();
      if (world.rank() != 0) continue;
      seen.losses.push_back(outcome.loss);
      seen.norms.push_back(outcome.grad_norm);
    }
    const double loss = job.validate();
    if (run.to != nullptr) {
      checkpoint::CheckpointWriter saver(world, run.to->path());
      saver.save(job.steps_done(), job.contents());
      saver.wait();
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) seen.validation = loss;
    for (const models::StateBuffer& buffer : job.model().state_buffers()) {
      const auto [at, is_new] = seen.buffers.emplace(buffer.name, buffer.tensor.clone());
      EXPECT_TRUE(is_new || at::equal(at->second, buffer.tensor)) << "replicas differ in " << buffer.name;
    }
  });
  return seen;
}

void expect_same_buffers(const Outcome& ours, const Outcome& theirs) {
  ASSERT_EQ(ours.buffers.size(), theirs.buffers.size());
  for (const auto& [name, tensor] : theirs.buffers)
    EXPECT_TRUE(at::equal(ours.buffers.at(name), tensor)) << name;
}

void expect_same(const Outcome& ours, const Outcome& theirs) {
  EXPECT_EQ(ours.losses, theirs.losses);
  ASSERT_EQ(ours.norms.size(), theirs.norms.size());
  for (std::size_t i = 0; i < theirs.norms.size(); ++i)
    EXPECT_NEAR(ours.norms[i], theirs.norms[i], 1e-9 * theirs.norms[i]);
  EXPECT_EQ(ours.validation, theirs.validation);
  expect_same_buffers(ours, theirs);
}

// Sums in another order: differences are float32 rounding only.
void expect_near(const Outcome& ours, const Outcome& theirs) {
  ASSERT_EQ(ours.losses.size(), theirs.losses.size());
  for (std::size_t i = 0; i < theirs.losses.size(); ++i) {
    EXPECT_NEAR(ours.losses[i], theirs.losses[i], 2e-5 * theirs.losses[i]);
    EXPECT_NEAR(ours.norms[i], theirs.norms[i], 2e-4 * theirs.norms[i]);
  }
  expect_same_buffers(ours, theirs);
}

struct Parts {
  std::string name;
  Options options;
};

class HybridPartsJob : public ::testing::TestWithParam<Parts> {};

TEST_P(HybridPartsJob, PipelinesGiveTheSameBits) {
  const Options& options = GetParam().options;
  const Outcome one = train({.name = "one"}, options);
  static const Outcome plain = train({.name = "one"}, kBlocks);
  EXPECT_NE(one.losses, plain.losses);
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
  const Outcome one = train({.name = "one", .microbatch_size = 4}, options);
  const auto near = [&](const Layout& layout, Options more = {}) {
    SCOPED_TRACE(layout.name);
    more.insert(more.begin(), options.begin(), options.end());
    expect_near(train(layout, more), one);
  };
  near({.name = "pp2 dp2", .pp = 2, .dp = 2});
  near({.name = "shard2", .dp = 2}, {"--shard", "2"});
  near({.name = "two runs", .pp = 2, .microbatch_size = 4, .accumulation = 2, .microbatches = 2});
}

// Also the shares that tensor-parallel ranks send from stage to stage.
TEST_P(HybridPartsJob, TensorParallelRanksAgreeWithOneProcess) {
  const Outcome one = train({.name = "one"}, GetParam().options);
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
  const Outcome whole = train(writer, kAll, {.steps = 5});
  for (const auto& [name, bias] : whole.buffers) EXPECT_GT(bias.abs().max().item<double>(), 0) << name;
  EXPECT_EQ(whole.buffers.size(), 3u);
  const ScratchFolder scratch;
  train(writer, kAll, {.steps = 3, .to = &scratch});
  const auto rest = [](const Outcome& outcome) {
    return std::vector<double>(outcome.losses.end() - 2, outcome.losses.end());
  };
  const Outcome same = train(writer, kAll, {.steps = 5, .from = &scratch});
  EXPECT_EQ(rest(same), rest(whole));
  expect_same_buffers(same, whole);
  const Outcome other = train(one, kAll, {.steps = 5, .from = &scratch});
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(rest(other)[i], rest(whole)[i], 2e-5 * rest(whole)[i]);
  expect_same_buffers(other, whole);
}

#ifdef PENSTOCK_HAVE_TOML
// A model that is loaded to generate has the buffers of the checkpoint.
TEST(HybridPartsCheckpoint, ALoadedModelHasItsBuffers) {
  const ScratchFolder scratch;
  const ResolvedConfig resolved = penstock::test::resolved_config_of({.name = "one"}, kAll);
  write_run_config(scratch.path(), resolved);
  const auto checkpoints = checkpoint_folder(resolved.config, scratch.path());
  std::map<std::string, at::Tensor> expected;
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
  const Outcome full = train({.name = "pp2", .pp = 2}, kAll);
  Options options = kAll;
  options.insert(options.end(), {"--precision", "bf16"});
  const Outcome low = train({.name = "pp2", .pp = 2}, options);
  for (std::size_t i = 0; i < full.losses.size(); ++i) {
    EXPECT_NE(low.losses[i], full.losses[i]);
    EXPECT_NEAR(low.losses[i], full.losses[i], 0.02 * full.losses[i]);
  }
}

}  // namespace hybrid_parts_job_test
}  // namespace penstock::train
