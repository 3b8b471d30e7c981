// Training in layouts compared with one process, tensor by tensor; a wrong gradient is found.
#include "penstock/train/job/parity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace parity_test {

using namespace std::chrono_literals;
using test::config_of;
using test::has_text;
using test::Layout;
using test::ScratchFolder;
using test::small_data;

constexpr int kSteps = 2;

void record(const TrainConfig& config, const std::filesystem::path& folder,
            const TrainingJob::GradientHook& before = {}) {
  comm::run_ranks(static_cast<int>(config.layout.ranks), 120s, [&](comm::World& world) {
    record_side(world, config, small_data().open(config), folder, kSteps, before);
  });
}

ParityReport compare(const Layout& layout, const std::vector<std::string>& more = {},
                     const TrainingJob::GradientHook& before = {}) {
  const ScratchFolder scratch;
  const TrainConfig config = config_of(layout, more);
  record(one_process(config), scratch / "one");
  record(config, scratch / "layout", before);
  return compare_sides(scratch / "one", scratch / "layout", kSteps, parity_tolerance(config));
}

std::size_t rows_of(const ParityReport& report, const std::string& tensor, ParityRow::Kind kind) {
  std::size_t count = 0;
  for (const ParityRow& row : report.rows) count += row.tensor == tensor && row.kind == kind;
  return count;
}

TEST(Parity, PipelinesAreEqual) {
  for (const Layout& layout :
       {Layout{.name = "pp2", .pp = 2},
        Layout{.name = "ZBV", .pp = 2, .virtual_stages = 2, .schedule = "ZBVZeroBubble"},
        Layout{.name = "two runs of pp4", .pp = 4, .accumulation = 2}}) {
    SCOPED_TRACE(layout.name);
    EXPECT_TRUE(expects_same_bits(config_of(layout)));
    const ParityReport report = compare(layout);
    EXPECT_TRUE(report.ok()) << to_text(report, true);
    for (const ParityRow& row : report.rows) EXPECT_EQ(row.difference, 0) << row.tensor;
    // 1 embedding, 4 blocks of 9, 1 norm, and the embedding's copy at the head: on two ranks of a loop, on
    // one of a V.
    const std::size_t tensors = 38 + (layout.schedule == "ZBVZeroBubble" ? 0 : 1);
    EXPECT_EQ(report.rows.size(), kSteps * (1 + 2 * tensors));
    EXPECT_EQ(rows_of(report, "blocks.3.feed.down.weight", ParityRow::Kind::Gradient),
              static_cast<std::size_t>(kSteps));
  }
}

// Auxiliary losses are compared by name, in pipelines up to the rounding of their sums.
TEST(Parity, AuxiliaryLossesAreCompared) {
  const std::vector<std::string> experts{"--pattern", "AEFE", "--attention_feed", "false",
                                         "--experts", "4",    "--expert_width",   "16"};
  const ParityReport report = compare({.name = "pp2", .pp = 2}, experts);
  EXPECT_TRUE(report.ok()) << to_text(report, true);
  for (const char* name : {"loss", "balance", "router_z"})
    EXPECT_EQ(rows_of(report, name, ParityRow::Kind::Loss), static_cast<std::size_t>(kSteps)) << name;
  // A loss that one side lacks is an error, whatever the tolerance.
  const ScratchFolder scratch;
  std::vector<std::string> without = experts;
  without[1] = "AAFA";
  record(config_of({.name = "one"}, experts), scratch / "one");
  record(config_of({.name = "one"}, without), scratch / "layout");
  const ParityReport other =
      compare_sides(scratch / "one", scratch / "layout", kSteps, {.gradients = 1e9, .parameters = 1e9});
  EXPECT_FALSE(other.ok());
  for (const ParityRow& row : other.rows) {
    if (row.tensor == "balance") {
      EXPECT_EQ(row.note, "only in one process");
    }
  }
}

TEST(Parity, ReplicasAndTensorParallelRanksDifferByRounding) {
  const Layout layout{.name = "pp2 dp2 tp2", .pp = 2, .dp = 2, .tp = 2};
  EXPECT_FALSE(expects_same_bits(config_of(layout)));
  const ParityReport report = compare(layout);
  EXPECT_TRUE(report.ok()) << to_text(report, true);
  EXPECT_GT(report.rows.front().relative, 0);
  EXPECT_EQ(rows_of(report, "embed.weight (pipeline rank 1) (replica 1)", ParityRow::Kind::Parameter),
            static_cast<std::size_t>(kSteps));
}

// One process sends nothing between stages: only the layout rounds.
TEST(Parity, RoundedBordersDifferByTheirRounding) {
  const Layout layout{.name = "pp2", .pp = 2};
  for (const char* dtype : {"bf16", "fp8"}) {
    SCOPED_TRACE(dtype);
    const std::vector<std::string> rounded{"--border_dtype", dtype};
    EXPECT_FALSE(expects_same_bits(config_of(layout, rounded)));
    const ParityReport report = compare(layout, rounded);
    EXPECT_TRUE(report.ok()) << to_text(report, true);
    EXPECT_GT(report.rows.front().relative, 0);
  }
  EXPECT_TRUE(expects_same_bits(config_of(layout, {"--border_dtype", "same"})));
}

TEST(Parity, AWrongGradientIsFoundAndNamed) {
  const std::string wrong = "blocks.2.feed.up.weight";
  const auto spoil = [&](const std::vector<optim::NamedParameter>& parameters) {
    for (const optim::NamedParameter& parameter : parameters)
      if (parameter.name == wrong) parameter.tensor.grad().mul_(1.001);
  };
  const ParityReport report = compare({.name = "pp2", .pp = 2}, {}, spoil);
  EXPECT_FALSE(report.ok());
  const ParityRow& worst = report.rows.front();
  EXPECT_EQ(worst.step, 1);
  EXPECT_FALSE(worst.ok);
  std::vector<std::string> bad;
  for (const ParityRow& row : report.rows)
    if (!row.ok && row.step == 1 && row.kind == ParityRow::Kind::Gradient) bad.push_back(row.tensor);
  EXPECT_EQ(bad, std::vector<std::string>{wrong});
  const std::string text = to_text(report, false);
  EXPECT_TRUE(has_text(text, "FAIL"));
  EXPECT_TRUE(has_text(text, "parity: FAIL"));
  // A tolerance above the error accepts it.
  EXPECT_LT(worst.relative, 0.01);
}

TEST(Parity, WhatIsOnOneSideAloneFails) {
  const ScratchFolder scratch;
  const TrainConfig tied = config_of({.name = "one"}),
                    untied = config_of({.name = "one"}, {"--tie_head", "false"});
  record(tied, scratch / "one");
  record(untied, scratch / "layout");
  const ParityReport report =
      compare_sides(scratch / "one", scratch / "layout", kSteps, {.gradients = 1e9, .parameters = 1e9});
  EXPECT_FALSE(report.ok());
  EXPECT_TRUE(has_text(to_text(report, false), "only in the layout"));
  EXPECT_EQ(report.rows.front().tensor, "head.weight");
  EXPECT_TRUE(std::isinf(report.rows.front().difference));
}

TEST(Parity, TheOneProcessHasTheWholeBatch) {
  const TrainConfig config = config_of({.name = "pp2 dp2", .pp = 2, .dp = 2}, {"--pattern", "AA|AA"});
  const TrainConfig one = one_process(config);
  EXPECT_EQ(one.layout.ranks, 1);
  EXPECT_EQ(one.layout.microbatch_size, 2 * config.layout.microbatch_size);
  EXPECT_EQ(one.training.global_batch, config.training.global_batch);
  EXPECT_EQ(one.model.pattern, "AAAA");
}

TEST(Parity, TolerancesFollowPrecision) {
  const Layout dp2{.name = "dp2", .dp = 2};
  const double fp32 = parity_tolerance(config_of(dp2)).gradients,
               bf16 = parity_tolerance(config_of(dp2, {"--precision", "bf16"})).gradients;
  EXPECT_GT(fp32, 0);
  EXPECT_GT(bf16, fp32);
  const Layout pp2{.name = "pp2", .pp = 2};
  EXPECT_EQ(parity_tolerance(config_of(pp2, {"--precision", "bf16"})).parameters, 0);
  const double rounded = parity_tolerance(config_of(pp2, {"--border_dtype", "bf16"})).gradients,
               to_8_bits = parity_tolerance(config_of(pp2, {"--border_dtype", "fp8"})).gradients;
  EXPECT_GE(rounded, bf16);
  EXPECT_GT(to_8_bits, rounded);
}

}  // namespace parity_test
}  // namespace penstock::train
