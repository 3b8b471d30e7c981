// The output of a dry run.
#include "penstock/train/plan/dry_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"
#include "penstock/models/hybrid/trainable_hybrid.h"
#include "penstock/train/config/configured_plan.h"
#include "penstock/train/data/token_shard_writer.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/plan/part_costs.h"
#include "penstock/transformer_options.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/small_training.h"

namespace penstock::train {
namespace dry_run_test {

using test::config_of;
using test::has_text;
using test::Layout;
using test::small_data;

TrainConfig with_data(const Layout& layout, const std::vector<std::string>& more = {}) {
  TrainConfig config = config_of(layout, more);
  config.data.shards = (small_data().folder / "shards").string();
  return config;
}

// The same model with other values: (key, value) pairs.
TrainConfig small_config(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{
      "--preset",  "tiny", "--model.width",      "16",  "--layers",          "4",
      "--heads",   "2",    "--key_value_heads",  "2",   "--feed_width",      "32",
      "--context", "16",   "--model.vocabulary", "260", "--schedule",        "1F1B",
      "--pp",      "1",    "--microbatches",     "4",   "--microbatch_size", "2",
      "--steps",   "20",   "--warmup_steps",     "2",   "--layout.device",   "cpu"};
  for (std::size_t i = 0; i < more.size(); i += 2) {
    const auto place = std::find(arguments.begin(), arguments.end(), more[i]);
    if (place != arguments.end()) arguments.erase(place, place + 2);
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  if (std::find(more.begin(), more.end(), "--data") == more.end())
    arguments.insert(arguments.end(), {"--shards", (small_data().folder / "shards").string()});
  return parse_config("", "test", arguments).config;
}

// Every kind of block is measured, also those that only some tokens go through; the last stage predicts
// several tokens.
TEST(DryRun, HybridModelWithAllParts) {
  const DryRun run = dry_run(
      with_data({.name = "pp2", .pp = 2},
                {"--partition",        "count", "--pattern",          "AEME", "--attention_feed",    "false",
                 "--experts",          "4",     "--expert_width",     "16",   "--state_size",        "4",
                 "--state_head_width", "8",     "--depth_layers",     "0,3",  "--multi_token_depth", "2",
                 "--tie_head",         "false", "--router_bias_rate", "0.01"}));
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "stage 0: embed, blocks 0-1"));
  EXPECT_TRUE(has_text(text, "1 routed attention"));
  EXPECT_TRUE(has_text(text, "stage 1: blocks 2-3, norm, head, copy of embed"));
  for (const char* kind : {"routed attention", "experts", "state space", "routed experts"})
    EXPECT_GT(run.measured.blocks.at(kind).forward, 0) << kind;
  // The embedding is on both ranks.
  EXPECT_EQ(run.memory[0].parameters + run.memory[1].parameters,
            4 * (models::parameter_count(run.plan) + 260 * 16));
}

// The blocks of multi-token prediction belong to the head, and are recomputed like others of their letter.
TEST(DryRun, RecomputedBlocksOfMultiTokenPrediction) {
  const auto run_of = [](const std::vector<std::string>& recompute) {
    std::vector<std::string> more{"--partition",         "count", "--pattern",           "AEAE",
                                  "--attention_feed",    "false", "--experts",           "4",
                                  "--expert_width",      "16",    "--multi_token_depth", "2",
                                  "--multi_token_block", "E"};
    more.insert(more.end(), recompute.begin(), recompute.end());
    return dry_run(with_data({.name = "pp2", .pp = 2}, more));
  };
  const DryRun none = run_of({}), marks = run_of({"--recompute", "pattern:.E.E"}),
               experts = run_of({"--recompute", "experts"}),
               first = run_of({"--recompute", "experts", "--recompute_stages", "0"});
  EXPECT_FALSE(none.measured.recomputed_head);
  EXPECT_FALSE(marks.measured.recomputed_head);  // marks choose blocks of the pattern only
  ASSERT_TRUE(experts.measured.recomputed_head);
  const std::int64_t saved = experts.measured.head.kept - experts.measured.recomputed_head->kept;
  EXPECT_GT(saved, 0);
  // The last stage has one microbatch in flight.
  EXPECT_EQ(marks.memory[1].activations - experts.memory[1].activations, saved);
  EXPECT_EQ(marks.memory[0].activations, experts.memory[0].activations);
  EXPECT_EQ(none.memory[1].activations, first.memory[1].activations);
  EXPECT_TRUE(has_text(to_text(experts), "in a head whose blocks are recomputed"));
}

// A block that sees fewer tokens costs less: each window is a kind of its own.
TEST(DryRun, AttentionWithAWindowIsMeasuredApart) {
  const std::string with_window = "attention with a window of 4";
  const DryRun run = dry_run(with_data({.name = "one"}, {"--windows", "4,0"}));
  ASSERT_EQ(run.plan.blocks.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_EQ(run.plan.blocks[i].kind, i % 2 == 0 ? with_window : "attention") << i;
  ASSERT_EQ(run.measured.blocks.size(), 2u);
  for (const auto& [kind, measured] : run.measured.blocks) EXPECT_GT(measured.forward, 0) << kind;
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "2 attention, 2 " + with_window)) << text;
  EXPECT_TRUE(has_text(text, " in " + with_window)) << text;
  // As wide as a row, a window changes nothing.
  const DryRun whole = dry_run(with_data({.name = "one"}, {"--windows", "16,0"}));
  ASSERT_EQ(whole.measured.blocks.size(), 1u);
  EXPECT_EQ(whole.measured.blocks.begin()->first, "attention");
}

TEST(DryRun, OnePipeline) {
  const DryRun run = dry_run(with_data({.name = "pp2", .pp = 2}, {"--partition", "count"}));
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "mesh: 2 ranks = pp 2 x dp 1 x tp 1, on cpu"));
  EXPECT_TRUE(has_text(text, "rank 1: pp 1, dp 0, tp 0; stages 1\n"));
  EXPECT_TRUE(has_text(text, "stage 0: embed, blocks 0-1"));
  EXPECT_TRUE(has_text(text, "stage 1: blocks 2-3, norm, tied head"));
  EXPECT_TRUE(has_text(text, "schedule: 1F1B, 2 stages, 4 microbatches of 2 rows; bubble "));
  EXPECT_TRUE(has_text(text, "0F0"));
  EXPECT_TRUE(has_text(text, "predicted: "));
  EXPECT_TRUE(has_text(text, "per step of 128 tokens"));
  EXPECT_TRUE(has_text(text, "for 20 steps"));

  // 1F1B: the first rank holds two microbatches, the last one.
  ASSERT_EQ(run.memory.size(), 2u);
  EXPECT_EQ(run.memory[0].live, 2);
  EXPECT_EQ(run.memory[1].live, 1);
  EXPECT_GT(run.measured.blocks.at("attention").kept, 2 * 16 * 16 * 4);  // more than the block's output
  EXPECT_GE(run.memory[0].activations, 2 * 2 * run.measured.blocks.at("attention").kept);
  // A tied weight is on both ranks; AdamW has two tensors of a parameter's size.
  const models::TransformerOptions options = transformer_options(run.config.model);
  EXPECT_EQ(run.memory[0].parameters + run.memory[1].parameters,
            4 * (models::parameter_count(options) + options.vocabulary * options.width));
  EXPECT_EQ(run.memory[0].optimizer, 2 * run.memory[0].parameters);
  EXPECT_GT(run.measured.blocks.at("attention").forward, 0);
  EXPECT_GE(
      run.step_seconds,
      4 * 2 * (run.measured.blocks.at("attention").forward + run.measured.blocks.at("attention").backward));
}

// Every rank has two parts of the model; those of the first and the last also share a tied weight.
TEST(DryRun, DualPipeHasTheModelTwice) {
  const Layout layout{.name = "DualPipe", .pp = 2, .virtual_stages = 2, .schedule = "DualPipe"};
  const DryRun run = dry_run(with_data(layout, {"--partition", "count"}));
  ASSERT_EQ(run.parts.size(), 2u);
  const std::int64_t whole = 4 * models::parameter_count(run.plan), tied = 4 * 260 * 16;
  ASSERT_EQ(run.memory.size(), 2u);
  for (const RankMemory& rank : run.memory) {
    EXPECT_EQ(rank.parameters, whole);
    EXPECT_EQ(rank.gradients, whole + tied);
    EXPECT_EQ(rank.optimizer, 2 * whole);
  }
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "rank 0: pp 0, dp 0, tp 0; stages 0, 3\n")) << text;
  EXPECT_TRUE(has_text(text, "stage 1: blocks 2-3, norm, tied head")) << text;
  EXPECT_TRUE(has_text(text, "schedule: DualPipe, 4 stages, 4 microbatches of 2 rows")) << text;
  Layout two_runs = layout;
  two_runs.accumulation = 2;
  EXPECT_EQ(dry_run(with_data(two_runs, {"--partition", "count"})).memory[0].gradients, 2 * (whole + tied));
}

TEST(DryRun, ReplicasTensorParallelRanksAndVirtualStages) {
  const DryRun run = dry_run(with_data({.name = "all",
                                        .pp = 2,
                                        .virtual_stages = 2,
                                        .dp = 2,
                                        .tp = 2,
                                        .schedule = "ZBVZeroBubble",
                                        .accumulation = 2},
                                       {"--tie_head", "false", "--optimizer", "sgd", "--momentum", "0"}));
  const std::string text = to_text(run);
  EXPECT_TRUE(has_text(text, "mesh: 8 ranks = pp 2 x dp 2 x tp 2"));
  EXPECT_TRUE(has_text(text, "rank 5: pp 1, dp 0, tp 1; stages 1, 2\n"));
  EXPECT_TRUE(has_text(text, "2 runs per step"));
  EXPECT_TRUE(has_text(text, "each of 2 tensor-parallel ranks does an equal share"));
  EXPECT_EQ(run.memory[0].optimizer, 0);
  EXPECT_EQ(run.memory[0].gradients, 2 * run.memory[0].parameters);
  EXPECT_DOUBLE_EQ(run.step_seconds, 2 * run.simulation.time);
  EXPECT_EQ(run.tokens_per_step, 2 * 2 * 4 * 2 * 16);
}

// The inputs of blocks and the buffers of transfers are divided over the tensor-parallel ranks.
TEST(DryRun, SequenceParallelism) {
  const Layout layout{.name = "pp2 tp2", .pp = 2, .tp = 2};
  const DryRun whole = dry_run(with_data(layout, {"--partition", "count"})),
               divided =
                   dry_run(with_data(layout, {"--partition", "count", "--layout.sequence_parallel", "true"}));
  EXPECT_TRUE(has_text(to_text(divided), "tp 2 with sequence parallelism, on cpu"));
  EXPECT_FALSE(to_text(whole).find("sequence parallelism") != std::string::npos);
  // Microbatches of 2 rows of 16 tokens, of width 16 in float32; at most two are in flight on the first rank,
  // with two blocks, and the output that is being sent, the gradient that has arrived, and the buffer of the
  // next one. A transport that does not tell when something has been sent holds one output more.
  constexpr std::int64_t kHidden = 2 * 16 * 16 * 4;
  const int between_stages = comm::ucx_available() ? 3 : 4;
  EXPECT_EQ(whole.memory[0].activations - divided.memory[0].activations,
            (2 * 2 + between_stages) * kHidden / 2);
  EXPECT_TRUE(has_text(to_text(divided), "transfers of 1.0 KiB"));
}

// A rank has a part of the experts, and with sharding a part of that.
TEST(DryRun, ExpertsAreDividedOverRanks) {
  const std::vector<std::string> experts{"--pattern", "AEFE", "--attention_feed", "false",
                                         "--experts", "4",    "--expert_width",   "24"};
  const auto parameters = [&](const char* ep, const char* shard) {
    std::vector<std::string> more = experts;
    more.insert(more.end(), {"--ep", ep, "--shard", shard});
    const DryRun run = dry_run(with_data({.name = "dp4", .dp = 4}, more));
    EXPECT_EQ(has_text(to_text(run), "dp 4 (ep 2) x"), std::string(ep) == "2" && std::string(shard) == "1");
    return run.memory[0].parameters;
  };
  const std::int64_t all = 2 * 3 * 4 * 16 * 24 * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t whole = parameters("1", "1"), others = whole - all;
  EXPECT_EQ(parameters("2", "1"), others + all / 2);
  EXPECT_EQ(parameters("4", "1"), others + all / 4);
  EXPECT_EQ(parameters("2", "4"), parameters("1", "4"));
  EXPECT_EQ(parameters("2", "2") - parameters("1", "2"), 0);
  EXPECT_LT(parameters("4", "4"), others);
}

std::size_t lines_of(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(DryRun, FitsOnAScreenInAnyLayout) {
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {},
           {"--layers", "1000"},
           {"--layers", "1000", "--pp", "500", "--schedule", "GPipe"},
           {"--layers", "1000", "--partition", "count", "--pp", "300", "--microbatches", "2", "--schedule",
            "GPipe"},
           {"--layers", "8", "--pp", "8", "--microbatches", "8"},
           {"--layers", "8", "--pp", "8", "--dp", "4", "--microbatches", "64"},
           {"--layers", "64", "--pp", "2", "--virtual_stages", "32", "--schedule", "Interleaved1F1B"},
           {"--dp", "1024"},
           {"--layers", "1000", "--pp", "32", "--dp", "16", "--tp", "2", "--microbatches", "32"},
       }) {
    const std::string name = fmt::format("{}", fmt::join(more, " "));
    const TrainConfig config = small_config(more);
    const std::string text = to_text(dry_run(config));
    EXPECT_LE(lines_of(text), kDryRunLines) << name << "\n" << text;
    EXPECT_TRUE(has_text(text, "predicted: ")) << name;
  }
}

TEST(DryRun, EqualNeighboursAreOneLine) {
  const std::string text =
      to_text(dry_run(small_config({"--layers", "24", "--partition", "count", "--pp", "12", "--dp", "2",
                                    "--tp", "2", "--microbatches", "1", "--schedule", "GPipe"})));
  EXPECT_TRUE(has_text(text, "ranks 0-3: pp 0, dp 0-1, tp 0-1; stages 0\n"));
  EXPECT_TRUE(has_text(text, "stage 0: embed, blocks 0-1, "));
  EXPECT_TRUE(has_text(text, "stages 1-10: 2 blocks each, 2-21; each 0.0"));
  EXPECT_TRUE(has_text(text, "stage 11: blocks 22-23, norm, tied head"));
  EXPECT_TRUE(has_text(text, "\n       1-10  "));  // memory
  const std::string longer = to_text(dry_run(
      small_config({"--layers", "100", "--pp", "100", "--microbatches", "1", "--schedule", "GPipe"})));
  EXPECT_TRUE(has_text(longer, "more lines; tp fastest"));
  EXPECT_TRUE(has_text(longer, "rank 99: pp 99"));
}

// Regression: 27 seconds were spent on parameter names.
TEST(DryRun, ManyLayersTakeLittleTime) {
  const auto begin = std::chrono::steady_clock::now();
  const DryRun run = dry_run(small_config({"--layers", "8000"}));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  const models::TransformerOptions options = transformer_options(run.config.model);
  EXPECT_EQ(run.memory[0].parameters, 4 * models::parameter_count(options));
}

// A row that would take seconds is not measured whole; the bytes that it keeps are still those of a whole
// one.
TEST(DryRun, LongRowsAreExtrapolated) {
  const auto measured = [](const std::string& context) {
    const TrainConfig config =
        small_config({"--pattern", "FMFM", "--attention_feed", "false", "--model.width", "256",
                      "--feed_width", "2048", "--context", context, "--state_size", "16",
                      "--state_head_width", "32", "--state_chunk", "128", "--microbatch_size", "1"});
    return measure_parts(config, *models::trainable_hybrid(hybrid_options(config.model)), at::kCPU, {},
                         false);
  };
  const PartMeasurements small = measured("256"), twice = measured("512"), large = measured("32768");
  for (const auto& [kind, block] : large.blocks) {
    // These kinds keep a number of bytes per token, and weights that they join or cast.
    const auto one = static_cast<double>(small.blocks.at(kind).kept),
               two = static_cast<double>(twice.blocks.at(kind).kept);
    EXPECT_NEAR(static_cast<double>(block.kept) / (one + (two - one) * 127), 1, 0.001) << kind;
  }
}

TEST(DryRun, ReportsItsProgress) {
  std::vector<std::string> told;
  (void)dry_run(with_data({.name = "one"}), [&](const std::string& what, double share) {
    EXPECT_LE(share, 1);
    if (told.empty() || told.back() != what) told.push_back(what);
  });
  const std::string all = fmt::format("{}", fmt::join(told, "; "));
  for (const char* what : {"generating the schedule", "opening the data", "reading the training tokens",
                           "measuring", "simulating", "planning memory"})
    EXPECT_TRUE(has_text(all, what));
}

std::string refusal(const TrainConfig& config) {
  return test::message_of<ConfigError>([&] { (void)dry_run(config); });
}

TEST(DryRun, MoreRanksThanAHostStarts) {
  const std::string message = refusal(small_config({"--dp", "65536"}));
  EXPECT_TRUE(has_text(message, "layout.ranks: got 65536, expected at most 1024"));
  EXPECT_TRUE(has_text(message, "mpirun"));
}

TEST(DryRun, TooLittleText) {
  const test::ScratchFolder folder;
  const auto config = [&](const std::string& text, const std::vector<std::string>& more = {}) {
    folder.write("input.txt", text);
    std::vector<std::string> arguments{"--data", (folder / "input.txt").string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return small_config(arguments);
  };
  EXPECT_TRUE(has_text(refusal(config("short")), "got 6, expected more than the context of 16"));
  EXPECT_TRUE(has_text(refusal(config(std::string(200, 'a'))), "raise data.validation_fraction to 0.085"));
  EXPECT_TRUE(has_text(dry_run(config(std::string(200, 'a'), {"--validation_fraction", "0.085"})).data,
                       "184 for training and 17 for validation, cut inside documents, 11 samples per epoch"));
  std::string binary(300, 'a');
  binary[250] = '\0';
  EXPECT_TRUE(has_text(refusal(config(binary)), "zero byte at 250"));
}

// Damage that only reading finds, within the data that the run would read.
TEST(DryRun, DamagedData) {
  const test::ScratchFolder folder;
  {
    TokenShardWriter writer(folder / "shards.tokens",
                            {.vocabulary = 257, .end_of_document = 256, .block_bytes = 64});
    writer.add_document(std::vector<std::uint32_t>(5000, 7), 1);
    writer.finish();
  }
  auto bytes = test::read_bytes(folder / "shards.tokens");
  bytes[4000] ^= 1;
  test::write_bytes(folder / "shards.tokens", bytes);
  TrainConfig config = small_config({});
  config.data.shards = folder.path().string();
  EXPECT_TRUE(has_text(refusal(config), "bytes 3976 to 4039 are damaged"));
  config.training.steps = 1;  // eight samples of sixteen tokens
  EXPECT_NO_THROW((void)dry_run(config));

  std::vector<std::uint8_t> tokens(24'000'000, 0);
  tokens[2 * 100'000] = 4;
  tokens[2 * 100'000 + 1] = 1;
  test::write_bytes(folder / "train.bin", tokens);
  config = small_config(
      {"--data", (folder / "train.bin").string(), "--data.format", "uint16", "--steps", "1000000"});
  EXPECT_TRUE(has_text(refusal(config), "train.bin: token 100000: got 260"));
}

TEST(DryRun, RefusesWhatTrainingRefuses) {
  TrainConfig small = with_data({.name = "one"});
  small.model.vocabulary = 100;
  EXPECT_THROW(dry_run(small), ConfigError);
  TrainConfig nowhere = config_of({.name = "one"});
  nowhere.data.sources = {"/nonexistent"};
  EXPECT_THROW(dry_run(nowhere), ConfigError);
  TrainConfig heads = with_data({.name = "one"});
  heads.layout.tp = heads.layout.ranks = 4;
  EXPECT_THROW(dry_run(heads), ConfigError);
}

}  // namespace dry_run_test
}  // namespace penstock::train
