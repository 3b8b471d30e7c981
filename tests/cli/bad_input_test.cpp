// Every command with bad inputs: it ends in time, with a documented exit code and a message of Penstock.
//
//   PENSTOCK_BAD_INPUTS=200 build/release/tests/cli_plain_tests --of=bad_input_test  # cases per command
//   PENSTOCK_BAD_INPUT_SEED=7                                                         # other cases
//   PENSTOCK_BAD_INPUT_COMMAND='data make'                                            # only this command
#include <gtest/gtest.h>

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

#include "penstock/base/files.h"
#include "penstock/base/printable.h"
#include "tests/cli/bad_inputs.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace bad_input_test {

constexpr std::chrono::seconds kDeadline(60);

std::string program() { return environment("PENSTOCK_BIN") + "/penstock"; }

std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
  const std::string text = environment(variable);
  return text.empty() ? otherwise : std::stoull(text);
}

struct Task {
  const CommandHelp* command = nullptr;
  std::uint64_t number = 0;
};

TEST(BadInput, EveryCommandReportsItsOwnError) {
  const std::vector<CommandHelp> commands = all_commands(program());
  const std::vector<std::string> variables = own_variables(program());
  ASSERT_GE(commands.size(), 15U) << "commands of the program that --help lists";
  ASSERT_GE(variables.size(), 5U) << "variables in the program";
  // By default fewer of the commands that load LibTorch, which takes more time than all they do.
  const auto cases = [](const CommandHelp& command) {
    return number_of("PENSTOCK_BAD_INPUTS", loads_libtorch(command.name) ? 2 : 5);
  };
  const std::uint64_t seed = number_of("PENSTOCK_BAD_INPUT_SEED", 20261117);
  const std::string only = environment("PENSTOCK_BAD_INPUT_COMMAND");
  const ScratchFolder folder;
  const GoodFiles good = make_good_files(program(), folder.path());

  std::vector<Task> tasks;
  for (const CommandHelp& command : commands) {
    if (!has_good_line(command.name)) {
      ADD_FAILURE() << "penstock " << command.name
                    << " is new: give it a good command line in tests/cli/bad_inputs.cpp";
      continue;
    }
    for (std::uint64_t i = 0; i < cases(command) && (only.empty() || only == command.name); ++i)
      tasks.push_back({&command, i});
  }
  std::cout << tasks.size() << " bad inputs, seed " << seed << std::endl;

  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::map<std::string, std::map<int, int>> ends;  // count by command and exit code
  double slowest = 0;
  std::string slowest_command;
  const auto work = [&] {
    for (std::size_t i = next++; i < tasks.size(); i = next++) {
      const Task& task = tasks[i];
      std::seed_seq mixed{seed, std::uint64_t{std::hash<std::string>()(task.command->name)}, task.number};
      std::mt19937_64 chance(mixed);
      const std::filesystem::path place = folder / ("case-" + std::to_string(i));
      std::filesystem::create_directories(place);
      const BadInput bad = make_bad_input(program(), *task.command, good, variables, place, chance);
      const Ended ended = run_command(bad.command, kDeadline);
      const std::string wrong = objection(task.command->name, ended);
      std::error_code ignored;  // a leftover folder is removed with its parent
      remove_tree(place, ignored);
      const std::lock_guard lock(mutex);
      ++ends[task.command->name][ended.exit_code];
      if (ended.seconds > slowest) slowest = ended.seconds, slowest_command = bad.command;
      if (!wrong.empty())
        ADD_FAILURE() << task.command->name << ", case " << task.number << " of seed " << seed << ", "
                      << bad.kind << ": " << wrong << "\n  " << printable(shortened(bad.command, 1500))
                      << "\n  exit code " << ended.exit_code << " after " << ended.seconds << " s\n"
                      << printable(shortened(ended.output, 3000));
    }
  };
  std::vector<std::thread> workers;
  for (unsigned worker = 0; worker < std::max(2U, std::thread::hardware_concurrency()); ++worker)
    workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  for (const auto& [command, codes] : ends) {
    std::cout << "  " << command << ":";
    for (const auto& [code, count] : codes) std::cout << "  " << count << " x exit code " << code;
    std::cout << "\n";
  }
  std::cout << "  slowest: " << slowest << " s, " << printable(shortened(slowest_command, 300)) << std::endl;
}

// Tests the checker itself.
TEST(BadInput, ForbiddenOutputIsDetected) {
  const auto objects = [](int code, const std::string& output) {
    return !objection("train", Ended{code, 0.1, output}).empty();
  };
  EXPECT_FALSE(objects(0, "all well: 1.5 information\n"));
  EXPECT_FALSE(objects(2, "penstock: model.width: got 3, expected an even number\n"));
  EXPECT_FALSE(objects(1, "penstock: rank 0 failed\n[launch] rank 0 failed first\n"));
  EXPECT_TRUE(objects(Ended::kTimedOut, ""));
  EXPECT_TRUE(objects(139, "penstock: x\n"));
  EXPECT_TRUE(objects(134, "terminate called after throwing"));
  EXPECT_TRUE(objects(70, "penstock: internal error: stoi\n"));
  EXPECT_TRUE(objects(2, "--steps: bad\n"));
  EXPECT_TRUE(objects(2, ""));
  EXPECT_TRUE(objects(1, "penstock: no\nframe #0: c10::Error\n"));
  EXPECT_TRUE(objects(2, "penstock: got \x1b[2J\n"));
  EXPECT_TRUE(objects(2, "penstock: got \xff\n"));
  EXPECT_TRUE(objects(0, "predicted: -nan s\n"));
  EXPECT_TRUE(objects(0, "time inf\n"));
  EXPECT_TRUE(objects(2, "penstock: " + std::string(30000, 'x')));
}

// Cases that once printed a backtrace, an exception of the standard library, or nothing.
class KnownBadInput : public ::testing::Test {
 protected:
  // Refused as a usage error, with these words.
  static void expect_refused(const std::string& arguments, const std::vector<std::string>& words) {
    const Ended ended = run_command(arguments, kDeadline);
    EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.output;
    EXPECT_EQ(objection("train", ended), "") << arguments << "\n" << ended.output;
    for (const std::string& word : words)
      EXPECT_TRUE(has_text(ended.output, word)) << arguments << "\n" << ended.output;
  }
  std::string here(const std::string& arguments) const {
    return "cd '" + folder_.path().string() + "' && '" + program() + "' " + arguments;
  }

  const ScratchFolder folder_;
};

TEST_F(KnownBadInput, SizesBeyondMemory) {
  folder_.write("text.txt", std::string(5000, 'a'));
  const auto refused = [&](const std::string& command, const std::string& size,
                           std::vector<std::string> words) {
    words.insert(words.begin(), "penstock: memory: got a need of at least");
    expect_refused(here(command + " --data.sources text.txt --device cpu --pp 1 " + size), words);
  };
  for (const char* command :
       {"train --dry-run", "train --run_folder run", "inspect memory --predict-only", "parity --steps 1"})
    refused(command, "--context 16777216", {"TiB", "of model.context = 16777216", "lower model.context"});
  refused("train --run_folder run", "--vocabulary 4294967296", {"TiB", "model.vocabulary = 4294967296"});
  refused("train --run_folder run", "--preset tiny --width 1048576 --heads 1 --key_value_heads 1",
          {"model.width = 1048576"});
  expect_refused(here("inspect graph --vocabulary 4294967296"),
                 {"the embedding, model.vocabulary = 4294967296"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

TEST_F(KnownBadInput, UnavailableDevicesAndPrecisions) {
  folder_.write("text.txt", std::string(5000, 'a'));
  if (!std::filesystem::exists("/dev/nvidia0")) {
    for (const char* command :
         {"train --dry-run", "train --run_folder run", "inspect memory", "parity --steps 1"})
      expect_refused(here(std::string(command) + " --data.sources text.txt --pp 1 --device cuda"),
                     {"layout.device: got cuda, with 0 GPUs", "set layout.device to cpu"});
    expect_refused(here("generate run --device cuda"), {"--device: got cuda"});
    expect_refused(here("doctor --probe cuda"), {"--probe: got cuda, without a GPU"});
  }
  // LibTorch 2 supports it.
  const Ended half = run_command(
      here("train --dry-run --data.sources text.txt --device cpu --pp 1 --context 16 --precision fp16"),
      kDeadline);
  EXPECT_EQ(objection("train", half), "") << half.output;
  if (half.exit_code != 0) {
    EXPECT_EQ(half.exit_code, 2) << half.output;
    EXPECT_TRUE(has_text(half.output, "training.precision: got fp16 on the CPU"));
    expect_refused(
        here("train --run_folder run --data.sources text.txt --device cpu --pp 1 --precision fp16"),
        {"training.precision: got fp16 on the CPU", "bf16"});
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  }
}

TEST_F(KnownBadInput, FilesAndFoldersOfAnotherKind) {
  folder_.write("text.txt", "no run");
  std::filesystem::create_directories(folder_ / "folder");
  expect_refused(here("report text.txt"), {"penstock: text.txt"});
  expect_refused(here("report folder"), {"a folder with metrics.jsonl"});
  expect_refused(here("report " + std::string(300, 'n')), {"a folder with metrics.jsonl"});
  expect_refused(here("trace folder"), {"trace file folder: got a folder"});
  expect_refused(here("trace /dev/zero"), {"trace file /dev/zero: got a device"});
  expect_refused(here("trace text.txt"), {"text.txt: trace of a step", "parse error"});
  expect_refused(here("train /dev/zero --dry-run"), {"/dev/zero: configuration file: got a device"});
  expect_refused(here("train --schedule /dev/zero --dry-run"), {"schedule /dev/zero: got a device"});
  expect_refused(here("check folder"), {"schedule folder: got a folder"});
  expect_refused(here("simulate /dev/zero"), {"schedule /dev/zero: got a device"});
  expect_refused(here("inspect graph folder"), {"graph file folder: got a folder"});
  expect_refused(here("inspect graph /dev/zero"), {"graph file /dev/zero: got a device"});
  expect_refused(here("generate " + std::string(300, 'n')), {"a folder with a config.toml"});
  expect_refused(here("data show " + std::string(300, 'n')), {"penstock: "});
  expect_refused(here("resume " + std::string(300, 'n')), {"the folder of a run"});
  expect_refused(here("train --dry-run --data.sources " + std::string(300, 'n')), {"penstock: "});
  expect_refused(here("train --steps 1 --data.sources text.txt --run_folder " + std::string(300, 'n')),
                 {"penstock: "});
  expect_refused(here("data make --out made --source " + std::string(300, 'n')), {"penstock: "});
  expect_refused(here("data make --out made --source text.txt --shard-tokens 0"),
                 {"--shard-tokens: got \"0\", expected a whole number from 1"});
  expect_refused(here("parity --keep text.txt/x"), {"--keep: got text.txt/x (Not a directory)"});
  expect_refused(
      "cd '" + folder_.path().string() + "' && TMPDIR=missing '" + program() + "' parity --device cpu",
      {"temporary folder"});
  expect_refused("cd '" + folder_.path().string() + "' && TMPDIR=missing '" + program() + "' doctor",
                 {"temporary folder"});
}

TEST_F(KnownBadInput, UnknownFlagsAreNamedWithThePageToRead) {
  expect_refused(here("data make --no-such"), {"penstock: ", "see penstock data make --help"});
  expect_refused(here("check \"$(printf '\\033[2J')\""), {"\\x1b[2J"});
  expect_refused(here("\"$(printf 'no\\033command')\""), {"no\\x1bcommand"});
}

}  // namespace bad_input_test
}  // namespace penstock::test
