// Random configurations that do not fit together, through the real `penstock train` with the processes that
// it starts: each is refused in time, with a message that names what is wrong, and leaves nothing behind.
//
//   PENSTOCK_INVALID_CONFIGURATIONS=100 build/release/tests/cli_plain_tests --of=invalid_configurations_test
//   PENSTOCK_INVALID_CONFIGURATIONS_SEED=7   # others
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/printable.h"
#include "tests/cli/bad_inputs.h"
#include "tests/cli/invalid_configurations.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace invalid_configurations_test {

namespace fs = std::filesystem;
using namespace configurations;

// A refusal takes a second, on a busy machine ten; ranks that wait for each other wait for 300.
constexpr std::chrono::seconds kDeadline(60);

std::string command_named(const std::string& name) { return environment("PENSTOCK_BIN") + "/" + name; }

std::uint64_t count_from(const char* variable, std::uint64_t otherwise) {
  const std::string text = environment(variable);
  return text.empty() ? otherwise : std::stoull(text);
}

const ConfigurationFiles& files() {
  static const ScratchFolder folder;
  static const ConfigurationFiles made = make_configuration_files(command_named("penstock"), folder.path());
  return made;
}

std::string described(const InvalidConfiguration& invalid) {
  std::string text = invalid.layout + ":";
  for (const std::string& each : invalid.corruptions) text += " [" + each + "]";
  return text;
}

// What is wrong with how it ended, or nothing. `output`: of standard error alone.
std::string complaint(const InvalidConfiguration& invalid, const Ended& ended, bool left_a_run) {
  if (const std::string wrong = objection("train", ended); !wrong.empty()) return wrong;
  if (ended.exit_code == 0) return "it was accepted";
  if (!names_the_problem(invalid, ended.output)) return "the message does not name the problem";
  // A failure after the start, in the first step, is that of a run.
  if (left_a_run && ended.exit_code == 2) return "a run folder was left behind";
  return "";
}

Ended train(const InvalidConfiguration& invalid, const fs::path& folder) {
  fs::create_directories(folder);
  return run_command(
      "cd '" + folder.string() + "' && '" +
          command_named(invalid.needs_models ? "../tests/penstock-invalid-models" : "penstock") +
          "' train --run_folder=run --launch.timeout_s=20" + invalid.arguments +
          " </dev/null 2>&1 >/dev/null",
      kDeadline);
}

TEST(InvalidConfigurations, AreRefusedByName) {
  const std::uint64_t cases = count_from("PENSTOCK_INVALID_CONFIGURATIONS", 24),
                      seed = count_from("PENSTOCK_INVALID_CONFIGURATIONS_SEED", 20261118);
  const ScratchFolder folder;
  std::atomic<std::uint64_t> next{0};
  std::mutex mutex;
  std::map<int, int> ends;  // count by exit code
  std::map<std::string, int> used;
  double slowest = 0;
  std::string slowest_case;
  (void)files();
  const auto work = [&] {
    for (std::uint64_t i = next++; i < cases; i = next++) {
      std::seed_seq mixed{seed, i};
      Chance chance(mixed);
      const InvalidConfiguration invalid = make_invalid_configuration(files(), chance);
      const fs::path place = folder / std::to_string(i);
      const Ended ended = train(invalid, place);
      const std::string wrong = complaint(invalid, ended, fs::exists(place / "run"));
      const std::lock_guard lock(mutex);
      ++ends[ended.exit_code];
      for (const std::string& each : invalid.corruptions) ++used[each];
      if (ended.seconds > slowest) slowest = ended.seconds, slowest_case = described(invalid);
      if (!wrong.empty())
        ADD_FAILURE() << "case " << i << " of seed " << seed << ", " << described(invalid) << ": " << wrong
                      << "\n  " << invalid.arguments << "\n  exit code " << ended.exit_code << " after "
                      << ended.seconds << " s\n"
                      << printable(shortened(ended.output, 4000));
    }
  };
  std::vector<std::thread> workers;
  for (unsigned worker = 0; worker < std::max(2U, std::thread::hardware_concurrency()); ++worker)
    workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  std::cout << cases << " configurations, seed " << seed << ", " << used.size() << " of "
            << all_corruptions(files()).size() << " corruptions; exit codes";
  for (const auto& [code, count] : ends) std::cout << "  " << count << " x " << code;
  std::cout << "; slowest " << slowest << " s, " << slowest_case << std::endl;
}

// A configuration that would be refused without its corruption would test nothing.
TEST(InvalidConfigurations, LayoutsAreValidWithoutTheirCorruption) {
  const bool trains = environment("PENSTOCK_INVALID_CONFIGURATIONS") != "";
  const ScratchFolder folder;
  for (const ValidConfiguration& valid : valid_configurations(files())) {
    const std::string run = " --run_folder='" + (folder / valid.layout).string() + "'";
    const Ended ended = run_command(
        "'" + command_named("penstock") + "' " +
            (trains ? "train" + run + valid.arguments : "partition" + valid.plan_arguments) + " </dev/null",
        kDeadline);
    EXPECT_EQ(ended.exit_code, 0) << valid.layout << "\n" << ended.output;
  }
}

// Tests the checker itself.
TEST(InvalidConfigurations, WhatIsNotARefusalIsDetected) {
  InvalidConfiguration invalid;
  invalid.named = {{"layout.pp", "layout.schedule"}, {"model.width"}};
  const auto complains = [&](int code, const std::string& output, bool left = false) {
    return !complaint(invalid, Ended{code, 0.1, output}, left).empty();
  };
  EXPECT_FALSE(complains(2, "penstock: layout.pp = 3 is odd\n"));
  EXPECT_FALSE(complains(2, "penstock: model.width = 3 is odd\n"));
  EXPECT_TRUE(complains(2, "penstock: something is odd\n"));
  EXPECT_TRUE(complains(0, "penstock: layout.pp\n"));
  EXPECT_TRUE(complains(139, "penstock: layout.pp\n"));
  EXPECT_TRUE(complains(Ended::kTimedOut, "penstock: layout.pp\n"));
  EXPECT_TRUE(complains(1, "penstock: layout.pp\nException raised from infer_size at ../aten\n"));
  EXPECT_TRUE(complains(2, "penstock: layout.pp = 3 is odd\n", true));
  EXPECT_FALSE(complains(1, "penstock: layout.pp = 3 is odd\n", true));
}

}  // namespace invalid_configurations_test
}  // namespace penstock::test
