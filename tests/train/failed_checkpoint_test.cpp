// Checkpoints that cannot be written: what is reported, when, and how the run ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "penstock/checkpoint/files/folder.h"
#include "penstock/errors.h"
#include "penstock/train/job/trainer_access.h"
#include "penstock/train/report/metrics_file.h"
#include "penstock/trainer.h"
#include "penstock/world.h"
#include "tests/has_text.h"
#include "tests/train/folder_state.h"
#include "tests/train/small_training.h"

namespace penstock::test {
namespace failed_checkpoint_test {

using namespace train;
using namespace std::chrono_literals;

struct Told final : Observer {
  void on_step(const StepOutcome& outcome, const StepExtras&) override {
    events.push_back("step " + std::to_string(outcome.step));
  }
  void on_checkpoint(std::int64_t step, const checkpoint::SaveStall&) override {
    events.push_back("saved " + std::to_string(step));
  }
  void on_checkpoint_failed(std::int64_t step, const std::string& error) override {
    events.push_back("failed " + std::to_string(step));
    errors.push_back(error);
  }
  int count(const std::string& prefix) const {
    int found = 0;
    for (const std::string& event : events) found += event.starts_with(prefix);
    return found;
  }
  std::vector<std::string> events, errors;
};

TrainConfig config_with(const std::vector<std::string>& more) {
  std::vector<std::string> all{
      "--checkpoint.every",    "2",    "--validate_every", "0",
      "--trace_steps",         "1000", "--data.shards",    (small_data().folder / "shards").string(),
      "--validation_fraction", "0.3"};
  all.insert(all.end(), more.begin(), more.end());
  return config_of({.name = "", .pp = 2}, all);
}

struct Result {
  Told told;
  std::vector<RunEnd> ends;
};

Result run(const ScratchFolder& folder, TrainConfig config, std::int64_t steps,
           const checkpoint::WriteFault& fault) {
  config.training.steps = steps;
  config.training.warmup_steps = 0;
  Result result;
  result.ends.resize(2);
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    Trainer trainer = TrainerAccess::with_write_fault(world, config, folder / "run", {&result.told}, fault);
    result.ends.at(static_cast<std::size_t>(world.rank())) = trainer.run();
  });
  return result;
}

checkpoint::WriteFault full_disk() {
  return [](const std::filesystem::path&, std::uint64_t, std::uint64_t) { return ENOSPC; };
}

std::vector<std::string> checkpoints_in(const ScratchFolder& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "run/checkpoints"))
    if (entry.path().filename() != ".writer") names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(FailedCheckpoint, AnnouncedOnlyWhenItIsOnTheDisk) {
  const ScratchFolder folder;
  Told told;
  TrainConfig config = config_with({});
  config.training.steps = 3;
  std::vector<bool> on_disk;
  struct Looks final : Observer {
    void on_checkpoint(std::int64_t step, const checkpoint::SaveStall&) override {
      seen->push_back(std::filesystem::exists(at / checkpoint::step_folder_name(step) / "index.json"));
    }
    std::vector<bool>* seen = nullptr;
    std::filesystem::path at;
  } looks;
  looks.seen = &on_disk;
  looks.at = folder / "run/checkpoints";
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    // Slower than the steps are.
    const auto slow = [](const std::filesystem::path&, std::uint64_t, std::uint64_t) {
      std::this_thread::sleep_for(5ms);
      return 0;
    };
    Trainer trainer = TrainerAccess::with_write_fault(world, config, folder / "run", {&looks, &told}, slow);
    EXPECT_EQ(trainer.run(), RunEnd::Finished);
  });
  EXPECT_EQ(on_disk, (std::vector<bool>{true, true}));
  EXPECT_EQ(told.count("saved"), 2);
}

TEST(FailedCheckpoint, WithAnOlderOneTheRunContinuesAndEndsUnsaved) {
  const ScratchFolder folder;
  const TrainConfig config = config_with({});
  ASSERT_EQ(run(folder, config, 2, {}).ends, (std::vector<RunEnd>{RunEnd::Finished, RunEnd::Finished}));
  const FolderState before = state_of(folder / "run/checkpoints", false);
  const Result failed = run(folder, config, 7, full_disk());
  EXPECT_EQ(failed.ends, (std::vector<RunEnd>{RunEnd::NotSaved, RunEnd::NotSaved}));
  EXPECT_EQ(failed.told.count("step"), 5);
  EXPECT_EQ(failed.told.count("saved"), 0);
  EXPECT_EQ(failed.told.count("failed 4"), 1);
  EXPECT_EQ(failed.told.count("failed 6"), 1);
  EXPECT_EQ(failed.told.count("failed 7"), 2) << "the last one is tried twice";
  EXPECT_TRUE(has_text(failed.told.errors.at(0), "No space left on device"));
  EXPECT_EQ(difference(before, state_of(folder / "run/checkpoints", false)), "");
  // The first failure is reported before the next attempt.
  const auto at = [&](const std::string& event) {
    return std::find(failed.told.events.begin(), failed.told.events.end(), event) -
           failed.told.events.begin();
  };
  EXPECT_LT(at("failed 4"), at("failed 6"));
}

TEST(FailedCheckpoint, IsTriedAgainAtTheNextOne) {
  const ScratchFolder folder;
  const TrainConfig config = config_with({});
  ASSERT_EQ(run(folder, config, 2, {}).ends.at(0), RunEnd::Finished);
  const Result result =
      run(folder, config, 6, [](const std::filesystem::path& path, std::uint64_t, std::uint64_t) {
        return path.string().find("00000004") != std::string::npos ? ENOSPC : 0;
      });
  EXPECT_EQ(result.ends, (std::vector<RunEnd>{RunEnd::Finished, RunEnd::Finished}));
  EXPECT_EQ(result.told.count("failed 4"), 1);
  EXPECT_EQ(result.told.count("saved 6"), 1);
  EXPECT_EQ(checkpoints_in(folder), (std::vector<std::string>{"step-00000002", "step-00000006"}));
}

TEST(FailedCheckpoint, TheLastOneIsTriedAgainAtTheEnd) {
  const ScratchFolder folder;
  std::atomic<int> headers{0};  // rank 0 writes the header of a save's first file once
  TrainConfig config = config_with({});
  config.checkpoint.every = 0;
  const Result result =
      run(folder, config, 3, [&](const std::filesystem::path& path, std::uint64_t offset, std::uint64_t) {
        return offset == 0 && path.filename() == "model.safetensors" && headers++ == 0 ? ENOSPC : 0;
      });
  EXPECT_EQ(result.ends, (std::vector<RunEnd>{RunEnd::Finished, RunEnd::Finished}));
  EXPECT_EQ(result.told.count("failed 3"), 1);
  EXPECT_EQ(result.told.count("saved 3"), 1);
}

TEST(FailedCheckpoint, WithoutAnOlderOneTheRunEndsEarly) {
  const ScratchFolder folder;
  const Result result = run(folder, config_with({}), 1000, full_disk());
  EXPECT_EQ(result.ends, (std::vector<RunEnd>{RunEnd::NotSaved, RunEnd::NotSaved}));
  EXPECT_LT(result.told.count("step"), 200);
  EXPECT_EQ(result.told.count("saved"), 0);
  EXPECT_EQ(checkpoints_in(folder), std::vector<std::string>{});
}

// The first checkpoint fails, the immediate retry succeeds: nothing is lost, and the run continues.
TEST(FailedCheckpoint, ATransientFailureOfTheFirstOneCostsNothing) {
  const ScratchFolder folder;
  const Result result =
      run(folder, config_with({}), 9, [](const std::filesystem::path& path, std::uint64_t, std::uint64_t) {
        return path.string().find("00000002") != std::string::npos ? ENOSPC : 0;
      });
  EXPECT_EQ(result.ends, (std::vector<RunEnd>{RunEnd::Finished, RunEnd::Finished}));
  EXPECT_EQ(result.told.count("step"), 9);
  EXPECT_EQ(result.told.count("saved 9"), 1);
}

TEST(FailedCheckpoint, TheUserDecides) {
  const ScratchFolder going_on, stopping;
  const Result on = run(going_on, config_with({"--on_failure", "continue"}), 8, full_disk());
  EXPECT_EQ(on.told.count("step"), 8) << "without any checkpoint";
  EXPECT_EQ(on.ends.at(0), RunEnd::NotSaved);
  ASSERT_EQ(run(stopping, config_with({}), 2, {}).ends.at(0), RunEnd::Finished);
  const Result stopped = run(stopping, config_with({"--on_failure", "stop"}), 1000, full_disk());
  EXPECT_LT(stopped.told.count("step"), 200);
  EXPECT_EQ(stopped.ends.at(0), RunEnd::NotSaved);
}

TEST(Start, IsRefusedOnAllRanksBeforeAnythingChanges) {
  const ScratchFolder folder;
  ASSERT_EQ(run(folder, config_with({}), 2, {}).ends.at(0), RunEnd::Finished);
  const FolderState before = state_of(folder / "run");
  std::atomic<int> refused{0};
  const auto start = [&](const TrainConfig& config, const std::function<void()>& accepted) {
    comm::run_ranks(2, 60s, [&](comm::World& world) {
      try {
        TrainerOptions options;
        options.accepted = accepted;
        Trainer(world, config, folder / "run", {}, options);
      } catch (const std::exception&) {
        ++refused;
      }
    });
  };
  int accepted = 0;
  TrainConfig wider = config_with({});
  wider.model.feed_width = 64;
  start(wider, [&] { ++accepted; });
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(accepted, 0);
  start(config_with({}), [] { throw ConfigError("the configuration cannot be written"); });
  EXPECT_EQ(refused, 4);
  EXPECT_EQ(difference(before, state_of(folder / "run")), "");
}

}  // namespace failed_checkpoint_test
}  // namespace penstock::test
