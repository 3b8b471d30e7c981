// Training with generated code (training.compile = fused): within the stated tolerance of training operator
// by operator, and with its bits in exact mode.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/base/warnings.h"
#include "penstock/train/job/parity.h"
#include "penstock/train/job/stage_graphs.h"
#include "tests/has_text.h"
#include "tests/train/hybrid_job.h"

namespace penstock::train {
namespace fused_job_test {

using namespace penstock::test;

const Options kFused = {"--compile", "fused"};
const Options kTransformer = {"--dropout", "0.1"};
Options hybrid() { return with(with(hybrid_blocks(), hybrid_losses()), {"--dropout", "0.1"}); }

TrainedJob train(const Layout& layout, const Options& options) {
  return train_job(layout, options, {.steps = 3, .validates = true, .keeps = {.local = true}});
}

void expect_no_warning(const WarningCapture& warnings) {
  for (const Warning& warning : warnings.warnings()) EXPECT_NE(warning.category, "graph") << warning.message;
}

void expect_near_jobs(const TrainedJob& ours, const TrainedJob& plain, double loss, double norm) {
  expect_near_steps(ours, plain, loss, norm);
  EXPECT_NEAR(ours.validation, plain.validation, loss * plain.validation);
  EXPECT_GT(plain.local.size(), 20u);
  NamedTensors ours_gradients, plain_gradients;
  for (const auto& [name, tensor] : plain.local) {
    if (name.find("gradient 1 ") == std::string::npos) continue;
    plain_gradients[name] = tensor;
    ours_gradients[name] = ours.local.at(name);
  }
  EXPECT_GT(plain_gradients.size(), 10u);
  expect_near_tensors(ours_gradients, plain_gradients, norm * 10);
}

// The check compares each kernel with the operators, with one warning if they differ.
TEST(FusedJob, ATransformerIsCloseToTrainingByOperators) {
  const WarningCapture warnings;
  const TrainedJob fused =
      train({.name = "fused"}, with(with(kTransformer, kFused), {"--compile_check", "true"}));
  expect_near_jobs(fused, train({.name = "plain"}, kTransformer), 2e-5, 2e-4);
  expect_no_warning(warnings);
}

TEST(FusedJob, AHybridOverTwoStagesIsCloseToTrainingByOperators) {
  const WarningCapture warnings;
  const Layout layout{.name = "pp2", .pp = 2};
  const TrainedJob fused = train(layout, with(with(hybrid(), kFused), {"--compile_check", "true"}));
  expect_near_jobs(fused, train(layout, hybrid()), 2e-5, 2e-4);
  expect_no_warning(warnings);
}

// Forward, the backward of inputs and that of weights are generated separately.
TEST(FusedJob, SchedulesThatSplitTheBackward) {
  const Layout layout{.name = "zbv", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"};
  const WarningCapture warnings;
  const TrainedJob plain = train(layout, hybrid());
  expect_near_jobs(train(layout, with(with(hybrid(), kFused), {"--compile_check", "true"})), plain, 2e-5,
                   2e-4);
  const TrainedJob exact = train(layout, with(with(hybrid(), kFused), {"--compile_exact", "true"}));
  EXPECT_EQ(exact.losses(), plain.losses());
  expect_equal_tensors(exact.local, plain.local);
  expect_no_warning(warnings);
}

TEST(FusedJob, Bfloat16IsCloseToTrainingByOperators) {
  const WarningCapture warnings;
  const Options options = with(kTransformer, {"--precision", "bf16"});
  const TrainedJob fused = train({.name = "fused"}, with(with(options, kFused), {"--compile_check", "true"}));
  expect_near_steps(fused, train({.name = "plain"}, options), 2e-3, 3e-2);
  expect_no_warning(warnings);
}

TEST(FusedJob, ExactModeHasTheBitsOfTrainingByOperators) {
  for (const char* precision : {"fp32", "bf16"}) {
    const Options options = with(hybrid(), {"--precision", precision});
    const TrainedJob plain = train({.name = "plain"}, options),
                     fused = train(
                         {.name = "fused"},
                         with(with(options, kFused), {"--compile_exact", "true", "--compile_check", "true"}));
    EXPECT_EQ(fused.losses(), plain.losses()) << precision;
    EXPECT_EQ(fused.norms(), plain.norms()) << precision;
    expect_equal_tensors(fused.local, plain.local);
  }
}

TEST(FusedJob, ShardsAndTensorParallelism) {
  const Options splittable = {"--pattern", "AEAE", "--experts", "4", "--expert_width", "16"};
  for (const auto& [layout, options] :
       {std::pair(Layout{.name = "shards", .dp = 2}, with(kTransformer, {"--shard", "2"})),
        std::pair(Layout{.name = "tp", .tp = 2}, splittable)}) {
    const WarningCapture warnings;
    const TrainedJob fused = train(layout, with(options, kFused));
    expect_near_steps(fused, train(layout, options), 2e-5, 2e-4);
    expect_no_warning(warnings);
  }
}

TEST(FusedJob, ParityExpectsRoundingUnlessExact) {
  const auto config_with = [](const Options& options) {
    return resolved_config_of({.name = "one"}, options).config;
  };
  EXPECT_TRUE(expects_same_bits(config_with({"--compile", "graph"})));
  EXPECT_EQ(graph_compiler_of(config_with({"--compile", "graph"})), "executor");
  EXPECT_FALSE(expects_same_bits(config_with(kFused)));
  EXPECT_EQ(graph_compiler_of(config_with(kFused)), "fused");
  EXPECT_TRUE(expects_same_bits(config_with(with(kFused, {"--compile_exact", "true"}))));
}

}  // namespace fused_job_test
}  // namespace penstock::train
