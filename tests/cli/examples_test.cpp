// Runs the programs in examples/ as described in their first lines.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/command.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace examples_test {

std::vector<double> losses_of(const std::string& output) {
  std::vector<double> losses;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);)
    if (const auto at = line.find("loss "); at != std::string::npos)
      losses.push_back(std::strtod(line.c_str() + at + 5, nullptr));
  return losses;
}

TEST(Examples, TrainsATransformerByAKnownScheduleAndByOneFromAFile) {
  const std::string bin = environment("PENSTOCK_BIN"), source = environment("PENSTOCK_SOURCE");
  const std::string command =
      "'" + bin + "/penstock' launch -n 2 -- '" + bin + "/train_transformer' '" + source + "/README.md'";
  const Ended known = run_command(command, std::chrono::seconds(110)),
              own = run_command(command + " '" + source + "/examples/own_schedule.csv'",
                                std::chrono::seconds(110));
  ASSERT_EQ(known.exit_code, 0) << known.output;
  ASSERT_EQ(own.exit_code, 0) << own.output;
  const std::vector<double> losses = losses_of(known.output);
  ASSERT_EQ(losses.size(), 6u) << known.output;
  EXPECT_LT(losses.back(), losses.front() - 0.5);
  // Another order of the same work.
  EXPECT_EQ(losses, losses_of(own.output));
}

TEST(Examples, TrainsAModelOfTheProgramsOwn) {
  const std::string bin = environment("PENSTOCK_BIN"), source = environment("PENSTOCK_SOURCE");
  const ScratchFolder folder;
  const auto losses_with = [&](const std::string& launch, const std::string& ranks) {
    const Ended ended =
        run_command(launch + "'" + bin + "/own_model' '" + (folder / ("pp" + ranks)).string() + "' --data '" +
                        source + "/README.md' --steps 6 --context 64 --layers 4 --pp " + ranks,
                    std::chrono::seconds(110));
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    return losses_of(ended.output);
  };
  const std::vector<double> alone = losses_with("", "1"),
                            split = losses_with("'" + bin + "/penstock' launch -n 2 -- ", "2");
  ASSERT_EQ(alone.size(), 6u);
  EXPECT_LT(alone.back(), alone.front() - 0.1);
  ASSERT_EQ(split.size(), 6u);
  for (std::size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(split[i], alone[i], 2e-4) << "step " << i + 1;
}

TEST(Examples, CompilesWithACompilerOfTheProgramsOwn) {
  const Ended ended =
      run_command("'" + environment("PENSTOCK_BIN") + "/own_compiler'", std::chrono::seconds(60));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_NE(ended.output.find("forward: 2 fused\n"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("gradients are the same"), std::string::npos) << ended.output;
}

TEST(Examples, EndWithAMessageWhenSomethingFails) {
  for (const char* example :
       {"hello_world", "pipeline", "tensor_parallel", "distributed_tensor", "train_transformer"}) {
    const Ended ended = run_command("RANK=x WORLD_SIZE=2 '" + environment("PENSTOCK_BIN") + "/" + example +
                                    "' '" + environment("PENSTOCK_SOURCE") + "/README.md'");
    EXPECT_EQ(ended.exit_code, 1) << example;
    EXPECT_EQ(ended.output, std::string(example) +
                                ": environment variable RANK: got \"x\", expected a whole number from 0 to "
                                "1048575; let the launcher set it, or unset it to run one rank\n");
  }
}

TEST(Examples, SayHowTheyAreUsed) {
  const Ended ended = run_command("'" + environment("PENSTOCK_BIN") + "/train_transformer'");
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_NE(ended.output.find("usage: train_transformer TEXT"), std::string::npos) << ended.output;
}

}  // namespace examples_test
}  // namespace penstock::test
