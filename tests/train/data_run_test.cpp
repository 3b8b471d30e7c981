// Runs on every kind of data train, and continue after a restart as if uninterrupted.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/job/configured_data.h"
#include "penstock/trainer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/token_file_bytes.h"

namespace penstock::test {
namespace data_run_test {

using namespace train;
using namespace std::chrono_literals;

// Any exception type: ranks exchange each other's errors as text.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return {};
}

struct Seen final : Observer {
  void on_start(const RunDescription& description) override { start = description; }
  void on_step(const StepOutcome& outcome, const StepExtras&) override { losses.push_back(outcome.loss); }
  void on_validation(std::int64_t, double loss, double) override { validations.push_back(loss); }
  RunDescription start;
  std::vector<double> losses, validations;
};

TrainConfig config_with(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"--preset",
                                     "tiny",
                                     "--model.width",
                                     "16",
                                     "--layers",
                                     "2",
                                     "--heads",
                                     "2",
                                     "--key_value_heads",
                                     "2",
                                     "--feed_width",
                                     "32",
                                     "--context",
                                     "16",
                                     "--pp",
                                     "1",
                                     "--microbatches",
                                     "4",
                                     "--microbatch_size",
                                     "2",
                                     "--steps",
                                     "6",
                                     "--validate_every",
                                     "3",
                                     "--validate_batches",
                                     "1",
                                     "--checkpoint.every",
                                     "3",
                                     "--keep",
                                     "5",
                                     "--trace_steps",
                                     "1000",
                                     "--layout.device",
                                     "cpu",
                                     "--warmup_steps",
                                     "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return parse_config("", "test", arguments).config;
}

Seen run(const std::filesystem::path& folder, const TrainConfig& config) {
  Seen seen;
  comm::run_ranks(1, 120s, [&](comm::World& world) { Trainer(world, config, folder, {&seen}).run(); });
  return seen;
}

// Trains all steps, then repeats the last ones from the checkpoint in the middle.
void expect_same_after_restart(const ScratchFolder& folder, std::vector<std::string> arguments) {
  const Seen whole = run(folder / "whole", config_with(arguments));
  ASSERT_EQ(whole.losses.size(), 6u);
  EXPECT_GT(whole.start.validation_tokens, 16u);
  EXPECT_GT(whole.start.training_tokens, whole.start.validation_tokens);
  arguments.insert(arguments.end(), {"--resume", (folder / "whole/checkpoints/step-00000003").string()});
  const Seen rest = run(folder / "rest", config_with(arguments));
  EXPECT_EQ(rest.start.first_step, 3);
  EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 3, whole.losses.end()));
  ASSERT_FALSE(rest.validations.empty());
  EXPECT_EQ(rest.validations.back(), whole.validations.back());
}

std::string some_text(std::size_t size) {
  std::string text;
  for (int i = 0; text.size() < size; ++i) text += "line " + std::to_string(i * 7919 % 1000) + "\n";
  text.resize(size);
  return text;
}

std::vector<std::uint32_t> some_tokens(std::size_t count, std::uint32_t below, std::uint32_t end) {
  std::vector<std::uint32_t> tokens;
  for (std::size_t i = 0; i < count; ++i)
    tokens.push_back(i % 37 == 0 ? end : static_cast<std::uint32_t>(i * 7919 % 97 * 3 % below));
  return tokens;
}

// Larger than a mebibyte and a single document: both were once rejected.
TEST(DataRun, OneTextFileJustTrains) {
  const ScratchFolder folder;
  folder.write("input.txt", some_text(1'100'000));
  expect_same_after_restart(folder, {"--data", (folder / "input.txt").string()});
}

TEST(DataRun, TokenFilesOfLlmC) {
  const ScratchFolder folder;
  std::filesystem::create_directories(folder / "gpt2");
  write_bytes(folder / "gpt2/a_000001.bin", gpt2_file(some_tokens(3000, 50256, 50256)));
  write_bytes(folder / "gpt2/a_000002.bin", gpt2_file(some_tokens(2000, 50256, 50256)));
  const std::vector<std::string> more{"--model.vocabulary", "50257", "--data",
                                      (folder / "gpt2/*.bin").string()};
  expect_same_after_restart(folder, more);
  EXPECT_FALSE(std::filesystem::exists(folder / "whole/data"));  // they are read in place
}

TEST(DataRun, TokenFilesWithoutAHeader) {
  const ScratchFolder folder;
  write_bytes(folder / "train.bin", bare_file(some_tokens(4000, 200, 3)));
  expect_same_after_restart(folder, {"--data.format", "uint16", "--data", (folder / "train.bin").string()});
}

TEST(DataRun, WhatIsRefusedSaysWhatToDo) {
  const ScratchFolder folder;
  write_bytes(folder / "train.bin", bare_file(some_tokens(4000, 50256, 50256)));
  write_bytes(folder / "gpt2.bin", gpt2_file(some_tokens(4000, 50256, 50256)));
  folder.write("input.txt", some_text(300));
  const auto refusal = [&](const std::vector<std::string>& more) {
    return error_of([&] { run(folder / "run", config_with(more)); });
  };
  EXPECT_TRUE(has_text(refusal({"--data", (folder / "train.bin").string()}), "data.format = \"uint16\""));
  // GPT-2 tokens in a model for bytes.
  EXPECT_TRUE(has_text(refusal({"--data", (folder / "train.bin").string(), "--data.format", "uint16"}),
                       "train.bin: token 0: got 50256, expected a number below the vocabulary of 257"));
  EXPECT_TRUE(has_text(refusal({"--data", (folder / "gpt2.bin").string()}),
                       "model.vocabulary: got 257, expected at least the 50257 of the data"));
  EXPECT_TRUE(
      has_text(refusal({"--data", (folder / "gpt2.bin").string(), "--cap_bytes", "1000"}), "data.cap_bytes"));
  EXPECT_TRUE(has_text(refusal({"--data", (folder / "input.txt").string(), "--end_of_document", "10"}),
                       "data.end_of_document"));
  EXPECT_TRUE(has_text(refusal({"--data", (folder / "input.txt").string()}),
                       "raise data.validation_fraction to 0.057"));
}

// Work that the other ranks wait for may take longer than their timeouts.
TEST(LongWork, DoesNotTimeOutTheOtherRanks) {
  std::atomic<int> done{0};
  comm::run_ranks(3, 60s, [&](comm::World& world) {
    run_on_first_rank(world, "work", 10ms, [&](const std::atomic<bool>& stop) {
      std::this_thread::sleep_for(200ms);
      EXPECT_FALSE(stop);
      ++done;
    });
    EXPECT_EQ(done, 1) << "rank " << world.rank();
  });
  // All ranks get its error.
  const std::string message = error_of([] {
    comm::run_ranks(2, 60s, [](comm::World& world) {
      run_on_first_rank(world, "work", 10ms,
                        [](const std::atomic<bool>&) { throw ConfigError("no such text"); });
      ADD_FAILURE() << "rank " << world.rank() << " continues";
    });
  });
  EXPECT_TRUE(has_text(message, "no such text"));
}

// If a waiting rank leaves, the work is stopped.
TEST(LongWork, IsStoppedWhenARankIsGone) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<bool> stopped{false};
  EXPECT_ANY_THROW(comm::run_ranks(2, 60s, [&](comm::World& world) {
    if (world.rank() == 1) throw StateError("gone");
    run_on_first_rank(world, "work", 10ms, [&](const std::atomic<bool>& stop) {
      while (!stop && std::chrono::steady_clock::now() < begin + 50s) std::this_thread::sleep_for(5ms);
      stopped = stop.load();
    });
  }));
  EXPECT_TRUE(stopped);
}

}  // namespace data_run_test
}  // namespace penstock::test
