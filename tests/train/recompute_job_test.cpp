// Training with recomputed activations: losses, gradients and parameters have the bits of training that keeps
// everything, in every schedule and layout.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/parity.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace recompute_job_test {

using namespace std::chrono_literals;
using penstock::test::config_of;
using penstock::test::has_text;
using penstock::test::Layout;
using penstock::test::message_of;
using penstock::test::small_data;

using Options = std::vector<std::string>;

// Everything that a forward could do differently the second time: routers with counters, mixtures of depths,
// dropout, masks, multi-token prediction.
const Options kEverything = {"--pattern",
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
                             "--router_z_weight",
                             "0.1",
                             "--depth_layers",
                             "1,2",
                             "--router_bias_rate",
                             "0.002",
                             "--multi_token_depth",
                             "1",
                             "--multi_token_block",
                             "E",
                             "--tie_head",
                             "false",
                             "--dropout",
                             "0.1"};
// What tensor parallelism can split.
const Options kSplittable = {"--pattern",      "AEAE", "--experts", "4",
                             "--expert_width", "16",   "--dropout", "0.1"};

Options with(Options all, const Options& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> tensors;  // gradients of every step, parameters and buffers, of all ranks
};

Outcome train(const Layout& layout, const Options& options) {
  const TrainConfig config = config_of(layout, options);
  Outcome seen;
  std::mutex mutex;
  comm::run_ranks(layout.pp * layout.dp * layout.tp, 120s, [&](comm::World& world) {
    TrainingJob job(world, config, small_data().open(config));
    const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const std::lock_guard lock(mutex);
      seen.tensors[std::to_string(world.rank()) + " " + name] =
          (is_dtensor(tensor) ? to_local(tensor) : tensor).detach().clone();
    };
    job.set_gradient_hook([&](const std::vector<optim::NamedParameter>& parameters) {
      for (const optim::NamedParameter& each : parameters)
        keep("gradient " + std::to_string(job.steps_done()) + " " + each.name, each.tensor.grad());
    });
    while (job.steps_done() < 2) {
      const StepOutcome outcome = job.train_step();
      const std::lock_guard lock(mutex);
      if (world.rank() == 0) seen.losses.push_back(outcome.loss);
    }
    job.set_gradient_hook({});
    for (const optim::NamedParameter& each : job.model().parameters()) keep(each.name, each.tensor);
    for (const models::StateBuffer& buffer : job.model().state_buffers()) keep(buffer.name, buffer.tensor);
  });
  return seen;
}

void expect_same(const Outcome& ours, const Outcome& plain) {
  EXPECT_EQ(ours.losses, plain.losses);
  ASSERT_EQ(ours.tensors.size(), plain.tensors.size());
  EXPECT_GT(plain.tensors.size(), 20u);
  for (const auto& [name, tensor] : plain.tensors)
    EXPECT_TRUE(at::equal(ours.tensors.at(name), tensor)) << name;
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
  const Outcome plain = train(GetParam().layout, options);
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
