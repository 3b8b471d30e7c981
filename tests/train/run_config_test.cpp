// The configuration in a run folder: where it is read, and what may change.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/config/run_config.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace run_config_test {

using namespace train;
namespace fs = std::filesystem;

// Makes a run folder as after a start with these arguments.
fs::path make_run(const ScratchFolder& scratch, const std::string& name,
                  const std::vector<std::string>& arguments = {}) {
  const fs::path folder = scratch / name;
  const ResolvedConfig resolved =
      with_absolute_paths(load_config({.file = {}, .arguments = arguments}), folder);
  scratch.write(name + "/config.toml", run_config_text(resolved, folder));
  return folder;
}

TrainConfig continued(const fs::path& folder, const std::vector<std::string>& arguments) {
  return continue_run_config(folder, {.file = {}, .arguments = arguments}).config;
}
std::string refusal(const fs::path& folder, const std::vector<std::string>& arguments) {
  return message_of<ConfigError>([&] { (void)continued(folder, arguments); });
}

TEST(RunConfig, DoesNotContainTheFoldersLocation) {
  const ScratchFolder scratch;
  const fs::path folder =
      make_run(scratch, "run", {"--checkpoint.folder", (scratch / "run/saved").string(), "--data", "text"});
  const std::vector<std::uint8_t> bytes = read_bytes(folder / "config.toml");
  const std::string text(bytes.begin(), bytes.end());
  EXPECT_FALSE(has_text(text, scratch.path().string()));
  EXPECT_TRUE(has_text(text, "folder = \"{run}/saved\""));
  EXPECT_TRUE(has_text(text, "run_folder = \"\""));
  EXPECT_TRUE(has_text(text, "sources = [\"" + (fs::current_path() / "text").string() + "\"]"))
      << "paths outside the run are absolute";
  EXPECT_EQ(load_run_config(folder).config.checkpoint.folder, (scratch / "run/saved").string());
  fs::rename(folder, scratch / "moved");
  EXPECT_EQ(load_run_config(scratch / "moved").config.checkpoint.folder, (scratch / "moved/saved").string());
  EXPECT_EQ(load_run_config(scratch / "moved/").config.checkpoint.folder, (scratch / "moved/saved").string());
}

TEST(RunConfig, WrittenAgainItIsTheSameText) {
  const ScratchFolder scratch;
  const fs::path folder = make_run(scratch, "run",
                                   {"--steps", "50", "--data", "a  # b", "--preset", "small", "--pp", "4",
                                    "--checkpoint.folder", (scratch / "run/saved").string()});
  const std::vector<std::uint8_t> bytes = read_bytes(folder / "config.toml");
  const std::string text(bytes.begin(), bytes.end());
  EXPECT_TRUE(has_text(text, "  # derived"));
  EXPECT_EQ(run_config_text(load_run_config(folder), folder), text);
  EXPECT_EQ(
      run_config_text(continue_run_config(folder, {.file = {}, .arguments = {"--steps", "50"}}), folder),
      text)
      << "the same command again";
  EXPECT_EQ(run_config_text(continue_run_config(folder, {.file = {}, .arguments = {"--pp", "4"}}), folder),
            text);
}

TEST(RunConfig, KeysNotGivenComeFromTheRun) {
  const ScratchFolder scratch;
  const fs::path folder =
      make_run(scratch, "run", {"--steps", "50", "--lr", "0.5", "--width", "96", "--dropout", "0.25"});
  const TrainConfig config = continued(folder, {"--steps", "80", "--dropout", "0.1"});
  EXPECT_EQ(config.training.steps, 80);
  EXPECT_EQ(config.training.lr, 0.5);
  EXPECT_EQ(config.model.width, 96);
  EXPECT_EQ(config.model.dropout, 0.1);
  // The user's file has a lower priority than the command line and a higher one than the run.
  const fs::path file = scratch.write("my.toml", "[training]\nsteps = 90\nlr = 0.125\n");
  const TrainConfig both = continue_run_config(folder, {.file = file, .arguments = {"--steps", "70"}}).config;
  EXPECT_EQ(both.training.steps, 70);
  EXPECT_EQ(both.training.lr, 0.125);
}

TEST(RunConfig, WhatTheRunDependsOnCannotChange) {
  const ScratchFolder scratch;
  const fs::path folder = make_run(scratch, "run", {"--preset", "tiny", "--data", "/text", "--width", "96"});
  EXPECT_TRUE(
      has_text(refusal(folder, {"--width", "192", "--layers", "6"}),
               "these cannot change when it continues: model.width = 192 (--width), but the run was started "
               "with 96; model.layers = 6 (--layers), but the run was started with 4; leave it out"));
  for (const std::vector<std::string>& change :
       std::vector<std::vector<std::string>>{{"--preset", "small"},
                                             {"--vocabulary", "300"},
                                             {"--context", "512"},
                                             {"--rope_theta", "500"},
                                             {"--tie_head", "false"},
                                             {"--heads", "3", "--key_value_heads", "3"},
                                             {"--seed", "2"},
                                             {"--optimizer", "sgd"},
                                             {"--data", "/else"},
                                             {"--extensions", ".h"},
                                             {"--validation_fraction", "0.5"},
                                             {"--cap_bytes", "17"},
                                             {"--checkpoint.folder", "/else"}})
    EXPECT_TRUE(has_text(refusal(folder, change), "cannot change when it continues")) << change.front();
  EXPECT_TRUE(has_text(refusal(folder, {"--data", "/else"}), "--resume"));
  EXPECT_TRUE(has_text(refusal(folder, {"--shards", "/shards"}), "data.shards"));
  // Equal values are not a change, and neither are stage boundaries.
  EXPECT_EQ(continued(folder, {"--width", "96", "--data", "/text", "--seed", "1", "--pattern", "AA|AA",
                               "--pp", "2", "--schedule", "1F1B"})
                .model.pattern,
            "AA|AA");
}

TEST(RunConfig, ShardsMayBeInAnotherPlace) {
  const ScratchFolder scratch;
  const fs::path folder = make_run(scratch, "run", {"--shards", "/before"});
  EXPECT_EQ(continued(folder, {"--shards", "/now"}).data.shards, "/now");
  EXPECT_TRUE(has_text(refusal(folder, {"--shards", "", "--data", "/text"}), "data."));
}

TEST(RunConfig, WhatWasDerivedIsDerivedForTheNewLayout) {
  const ScratchFolder scratch;
  const fs::path folder = make_run(scratch, "run", {"--layers", "8"});
  const TrainConfig own = load_run_config(folder).config;
  EXPECT_EQ(own.layout.ranks, 2);
  EXPECT_EQ(own.layout.schedule, "ZBVZeroBubble");
  const TrainConfig wider = continued(folder, {"--pp", "8"});
  EXPECT_EQ(wider.layout.ranks, 8);
  EXPECT_EQ(wider.layout.schedule, "1F1B");
  EXPECT_EQ(wider.layout.virtual_stages, 1);
  // The batch of a run does not belong to the layout: it changes only if requested.
  EXPECT_EQ(continued(folder, {"--microbatches", "4"}).training.accumulation, 2);
  EXPECT_EQ(continued(folder, {"--microbatches", "4"}).training.global_batch, own.training.global_batch);
  EXPECT_TRUE(has_text(refusal(folder, {"--dp", "2"}), "training.global_batch = 16"));
  EXPECT_EQ(continued(folder, {"--dp", "2", "--global_batch", "32"}).layout.ranks, 4);
  // Values chosen by the user are kept or refused.
  const fs::path chosen = make_run(scratch, "chosen", {"--schedule", "ZBVZeroBubble"});
  EXPECT_TRUE(has_text(refusal(chosen, {"--pp", "4"}), "layout.virtual_stages = 2"));
}

TEST(RunConfig, AnEditedValueIsKept) {
  const ScratchFolder scratch;
  const fs::path folder = make_run(scratch, "run", {"--layers", "8"});
  const std::vector<std::uint8_t> bytes = read_bytes(folder / "config.toml");
  std::string text(bytes.begin(), bytes.end());
  const std::string derived = "schedule = \"ZBVZeroBubble\"  # derived",
                    stages = "virtual_stages = 2  # derived";
  ASSERT_TRUE(has_text(text, derived));
  text.replace(text.find(derived), derived.size(), "schedule = \"GPipe\"  # derived");
  text.replace(text.find(stages), stages.size(), "virtual_stages = 1  # derived");
  scratch.write("run/config.toml", text);
  EXPECT_EQ(continued(folder, {"--pp", "4"}).layout.schedule, "GPipe");
}

TEST(RunConfig, FilesOfEarlierVersionsAreReadWhereTheyAre) {
  const ScratchFolder scratch;
  const std::string old =
      "[output]\nrun_folder = \"/long/ago\"\n[checkpoint]\nfolder = \"/long/ago/saved\"\n[data]\nshards = "
      "\"/long/agone\"\n";
  scratch.write("run/config.toml", old);
  scratch.write("run/metrics.jsonl", "");
  const TrainConfig config = load_run_config(scratch / "run").config;
  EXPECT_EQ(config.checkpoint.folder, (scratch / "run/saved").string());
  EXPECT_EQ(config.data.shards, "/long/agone");
  EXPECT_EQ(config.output.run_folder, "");
  EXPECT_EQ(named_run_folder({.file = scratch / "run/config.toml", .arguments = {}}), scratch / "run");
  EXPECT_EQ(named_run_folder({.file = scratch / "run/config.toml", .arguments = {"--run_folder", "x"}}), "x");
  const fs::path users = scratch.write("my.toml", "[output]\nrun_folder = \"/here\"\n");
  EXPECT_EQ(named_run_folder({.file = users, .arguments = {}}), "/here");
}

TEST(RunConfig, AFolderWithoutARunIsNamed) {
  const ScratchFolder scratch;
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { (void)load_run_config(scratch.path()); }),
                       "a folder with a config.toml"));
  scratch.write("run/config.toml", "[model]\nwidth = \"wide\"\n");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { (void)load_run_config(scratch / "run"); }),
                       "config.toml:2: model.width"));
}

}  // namespace run_config_test
}  // namespace penstock::test
