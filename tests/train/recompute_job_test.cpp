// Training with recomputed activations: losses, gradients and parameters have the bits of training that keeps
// everything, in every schedule and layout.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace recompute_job_test {

using namespace std::chrono_literals;
using namespace penstock::test;

// Everything that a forward could do differently the second time: routers with counters, mixtures of depths,
// dropout, masks, multi-token prediction.
const Options kEverything = with(with(hybrid_blocks(), hybrid_losses()),
                                 {"--router_bias_rate", "0.002", "--tie_head", "false", "--dropout", "0.1"});
// What tensor parallelism can split.
const Options kSplittable = {"--pattern",      "AEAE", "--experts", "4",
                             "--expert_width", "16",   "--dropout", "0.1"};

TrainedJob train(const Layout& layout, const Options& options) {
  return train_job(layout, options, {.steps = 2, .keeps = {.local = true}});
}

void expect_same(const TrainedJob& ours, const TrainedJob& plain) {
  EXPECT_EQ(ours.losses(), plain.losses());
  EXPECT_GT(plain.local.size(), 20u);
  expect_equal_tensors(ours.local, plain.local);
  expect_equal_tensors(ours.buffers, plain.buffers);
}

struct Case {
  Layout layout;
  Options options = {};
  std::vector<Options> recompute = {};
  Options model = kEverything;
};

class RecomputeJob : public ::testing::TestWithParam<Case> {};

TEST_P(RecomputeJob, HasTheBitsOfTrainingThatKeepsEverything) {
  const Options options = with(GetParam().model, GetParam().options);
  const TrainedJob plain = train(GetParam().layout, options);
  for (const Options& recompute : GetParam().recompute) {
    SCOPED_TRACE(recompute[1]);
    expect_same(train(GetParam().layout, with(options, recompute)), plain);
  }
}

const Options kBlocks = {"--recompute", "block"}, kExperts = {"--recompute", "experts"},
              kMarks = {"--recompute", "pattern:R.ME"};

INSTANTIATE_TEST_SUITE_P(
    Layouts, RecomputeJob,
    ::testing::Values(
        Case{{.name = "One"}, {}, {kBlocks, kMarks, with(kBlocks, {"--recompute_microbatches", "1,3"})}},
        Case{{.name = "OneF1B", .pp = 2}, {}, {kBlocks, with(kExperts, {"--recompute_stages", "1"})}},
        Case{{.name = "Zbv", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
             {},
             {kBlocks, with(kBlocks, {"--recompute_stages", "0,3", "--recompute_microbatches", "0,2"})}},
        Case{{.name = "DualPipeV", .pp = 2, .virtual_stages = 2, .schedule = "DualPipeV"},
             {},
             {kBlocks, kMarks}},
        Case{{.name = "LowPrecision", .pp = 2, .schedule = "ZB2P"}, {"--precision", "bf16"}, {kBlocks}},
        Case{{.name = "Sharded", .pp = 2, .dp = 2}, {"--shard", "2"}, {kBlocks, kExperts}},
        Case{{.name = "SplitExperts", .pp = 2, .virtual_stages = 2, .dp = 2, .schedule = "ZBVZeroBubble"},
             {"--ep", "2"},
             {kExperts}},
        Case{{.name = "TensorParallel", .tp = 2}, {}, {kBlocks}, kSplittable}),
    [](const auto& info) { return info.param.layout.name; });

TEST(RecomputeConfig, IsCheckedBeforeTraining) {
  const auto refusal = [](const Options& options) {
    return message_of<ConfigError>([&] {
      const TrainConfig config = config_of({.name = "pp2", .pp = 2}, with(kEverything, options));
      comm::run_ranks(2, 30s,
                      [&](comm::World& world) { TrainingJob job(world, config, small_data().open(config)); });
    });
  };
  EXPECT_TRUE(
      has_text(refusal({"--recompute", "pattern:R"}), "training.recompute: got \"pattern:R\", with 1 marks"));
  EXPECT_TRUE(has_text(refusal({"--recompute", "letters:F"}), "letters of blocks that the model has: AEM"));
  EXPECT_TRUE(has_text(refusal({"--recompute", "some"}), "expected none, block, attention"));
  EXPECT_TRUE(has_text(refusal(with(kBlocks, {"--recompute_stages", "2"})), "expected numbers from 0 to 1"));
  EXPECT_TRUE(
      has_text(refusal(with(kBlocks, {"--recompute_microbatches", "4"})), "expected numbers from 0 to 3"));
  EXPECT_TRUE(has_text(refusal({"--recompute_stages", "0"}), "has no effect with"));
}

TEST(RecomputeParity, IsComparedWithOneProcessThatKeepsEverything) {
  const TrainConfig one = one_process(
      config_of({.name = "pp2", .pp = 2}, with(with(kEverything, kBlocks), {"--recompute_stages", "1"})));
  EXPECT_EQ(one.training.recompute, "none");
  EXPECT_TRUE(one.training.recompute_stages.empty());
}

}  // namespace recompute_job_test
}  // namespace penstock::train
