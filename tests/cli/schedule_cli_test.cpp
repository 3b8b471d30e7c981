// Tests of the schedule commands.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "penstock/base/files.h"
#include "tests/command.h"

namespace penstock::test {
namespace schedule_cli_test {

using ::testing::HasSubstr;
using ::testing::Not;

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments);
}

class ScheduleCli : public ::testing::Test {
 protected:
  ScheduleCli()
      : folder_(std::filesystem::temp_directory_path() /
                ("penstock_schedule_cli_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~ScheduleCli() override {
    std::error_code ignored;  // a leftover folder is not a test failure
    remove_tree(folder_, ignored);
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(ScheduleCli, AFileIsReplacedAsAWholeOrNotAtAll) {
  write("plan.csv", "precious");
  const Ended ended = run_command("ulimit -f 1; '" + environment("PENSTOCK_BIN") +
                                  "/penstock' schedule --kind 1F1B --ranks 8 --microbatches 64 -o '" +
                                  path("plan.csv") + "'");
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("File too large"));
  EXPECT_EQ(read("plan.csv"), "precious");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path(".")), {}), 1)
      << "nothing is left of the attempt";
  EXPECT_EQ(
      penstock("schedule --kind 1F1B --ranks 2 --microbatches 4 -o '" + path("plan.csv") + "'").exit_code, 0);
  EXPECT_THAT(read("plan.csv"), HasSubstr("0F0"));
}

TEST_F(ScheduleCli, HelpHasAnExample) {
  for (const char* command : {"schedule", "check", "simulate", "compare"}) {
    const Ended ended = penstock(std::string(command) + " --help");
    EXPECT_EQ(ended.exit_code, 0);
    EXPECT_THAT(ended.output, HasSubstr("Example"));
    EXPECT_THAT(ended.output, HasSubstr(std::string("penstock ") + command));
  }
}

TEST_F(ScheduleCli, PrintsCsvGridAndJson) {
  EXPECT_EQ(penstock("schedule --kind GPipe --ranks 2 --microbatches 2").output,
            "0F0,0F1,0B0,0B1\n"
            "1F0,1F1,1B0,1B1\n");
  EXPECT_EQ(penstock("schedule --kind 1f1b --ranks 2 --microbatches 2 --format grid").output,
            "rank 0 | 0F0 0F1 .   0B0 .   0B1\n"
            "rank 1 | .   1F0 1B0 1F1 1B1\n");
  const auto document =
      nlohmann::json::parse(penstock("schedule --kind zbv --ranks 2 --microbatches 3 --format json").output);
  EXPECT_EQ(document.at("schedule"), "ZBVZeroBubble");
  EXPECT_EQ(document.at("stage_to_rank"), nlohmann::json::parse("[0,1,1,0]"));
  EXPECT_EQ(document.at("rows").size(), 2U);
}

TEST_F(ScheduleCli, LoweredFormNamesTransfers) {
  const Ended ended =
      penstock("schedule --kind 1F1B --ranks 2 --microbatches 2 --lowered --max-active-stages 1");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("0SEND_F0"));
  EXPECT_THAT(ended.output, HasSubstr("0UNSHARD"));
  EXPECT_THAT(ended.output, HasSubstr("1REDUCE_GRAD"));
}

TEST_F(ScheduleCli, EveryKindRoundTripsThroughAFileAndIsValid) {
  for (const char* kind : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                           "ZBVZeroBubble", "DualPipeV", "ZB2P", "VHalf", "VMin", "auto"}) {
    for (const char* form : {"", " --lowered"}) {
      const Ended made = penstock(std::string("schedule --kind ") + kind + " --ranks 4 --microbatches 8" +
                                  form + " -o '" + path("f.csv") + "'");
      ASSERT_EQ(made.exit_code, 0) << made.output;
      EXPECT_EQ(made.output, "");
      const Ended checked = penstock("check '" + path("f.csv") + "'");
      EXPECT_EQ(checked.exit_code, 0) << kind << form << checked.output;
      EXPECT_THAT(checked.output, HasSubstr("ok; 4 ranks"));
    }
  }
}

TEST_F(ScheduleCli, BidirectionalFilesNeedTheirPlacement) {
  ASSERT_EQ(
      penstock("schedule --kind DualPipe --ranks 4 --microbatches 8 -o '" + path("d.csv") + "'").exit_code,
      0);
  EXPECT_EQ(penstock("check --placement bidirectional '" + path("d.csv") + "'").exit_code, 0);
}

TEST_F(ScheduleCli, CorruptedFileIsExitCode1WithTheFirstViolation) {
  const Ended twice = penstock("check '" + write("twice.csv", "0F0,0F0,0B0\n1F0,1B0\n") + "'");
  EXPECT_EQ(twice.exit_code, 1);
  EXPECT_THAT(twice.output, HasSubstr("duplicate: 0F0 at rank 0, slot 1"));
  const Ended crossed =
      penstock("check '" + write("crossed.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n") + "'");
  EXPECT_EQ(crossed.exit_code, 1);
  EXPECT_THAT(crossed.output, HasSubstr("waits for"));
  const Ended misplaced =
      penstock("check --placement v '" + write("v.csv", "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n") + "'");
  EXPECT_EQ(misplaced.exit_code, 1) << misplaced.output;
  const Ended simulated = penstock("simulate '" + path("crossed.csv") + "'");
  EXPECT_EQ(simulated.exit_code, 1);
  EXPECT_THAT(simulated.output, HasSubstr("waits for"));
}

TEST_F(ScheduleCli, GarbageIsExitCode2WithLineAndColumn) {
  const std::string file = write("garbage.csv", "0F0,0B0\n1F0,1B0junk\n");
  for (const char* command : {"check '", "simulate '"}) {
    const Ended ended = penstock(command + file + "'");
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_THAT(ended.output, HasSubstr("line 2, column"));
  }
  const Ended missing = penstock("check '" + path("absent.csv") + "'");
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.output, HasSubstr("absent.csv"));
}

TEST_F(ScheduleCli, WrongUsageIsExitCode2AndNamesTheNearest) {
  const auto expect = [](const std::string& arguments, const std::string& words) {
    const Ended ended = penstock(arguments);
    EXPECT_EQ(ended.exit_code, 2) << arguments << ended.output;
    EXPECT_THAT(ended.output, HasSubstr(words)) << arguments;
  };
  expect("schedule --kind gpip --ranks 2 --microbatches 2", "did you mean GPipe?");
  expect("schedule --kind gpipe --ranks 2 --microbatches 2 --format smg", "did you mean svg?");
  expect("schedule --kind gpipe --microbatches 2", "--ranks");
  expect("schedule --kind 1F1B --ranks 4 --microbatches 2", "at least 4");
  expect("schedule --ranks 4 --microbatches 2", "--kind");
  expect("schedule --kind gpipe --ranks 2 --microbatches 2 -o /nonexistent/folder/f.csv",
         "/nonexistent/folder/f.csv");
  expect("simulate --kind gpipe --ranks 2 --microbatches 2 --cost sned=1", "did you mean send?");
  expect("simulate --kind gpipe --ranks 2 --microbatches 2 --cost F=1:2:3", "2 stages");
  expect("simulate", "neither a file nor --kind");
  expect("simulate --kind gpipe --ranks 2 --microbatches 2 --communication maybe", "overlapped or blocking");
  expect("schedule --kind auto --ranks 4 --microbatches 8 --max-activations 0", "memory limit");
  expect("compare --ranks 4", "--microbatches");
}

TEST_F(ScheduleCli, FlagsWithoutEffectAreRefused) {
  const std::string file = "'" + write("good.csv", "0F0,0B0\n1F0,1B0\n") + "'",
                    fixed = " --kind 1F1B --ranks 2 --microbatches 4 ";
  const auto refuses = [](const std::string& arguments, const std::string& flag) {
    const Ended ended = penstock(arguments);
    EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.output;
    EXPECT_THAT(ended.output, HasSubstr(flag + " has no effect")) << arguments;
  };
  refuses("simulate " + file + " --ranks 3", "--ranks");
  refuses("simulate " + file + " --microbatches 3", "--microbatches");
  refuses("simulate " + file + " --stages-per-rank 3", "--stages-per-rank");
  refuses("simulate " + file + " --group-size 3", "--group-size");
  refuses("simulate " + file + " --max-bytes 3G", "--max-bytes");
  refuses("simulate" + fixed + "--placement v", "--placement");
  refuses("simulate" + fixed + "--max-activations 2", "--max-activations");
  refuses("schedule" + fixed + "--max-bytes 3G", "--max-bytes");
  refuses("schedule --kind auto --ranks 2 --microbatches 4 --group-size 2", "--group-size");
  refuses("schedule" + fixed + "--max-active-stages 2", "--max-active-stages");
  refuses("schedule" + fixed + "--defer-receives", "--defer-receives");
  refuses("schedule" + fixed + "--cost F=2", "--cost");
  refuses("schedule" + fixed + "--format grid --memory act=2", "--memory");
  EXPECT_EQ(penstock("schedule" + fixed + "--format svg --cost F=2").exit_code, 0);
}

TEST_F(ScheduleCli, CostsThatOverflowAreRefused) {
  for (const char* costs :
       {"--cost F=1e308", "--cost F=1e308,send=1e308", "--cost bytes=1E,bandwidth=1e-300", "--memory act=7E"})
    for (const char* command : {"simulate --kind 1F1B ", "compare "}) {
      const Ended ended = penstock(std::string(command) + "--ranks 2 --microbatches 4 " + costs);
      EXPECT_EQ(ended.exit_code, 2) << command << costs << "\n" << ended.output;
      EXPECT_THAT(ended.output, Not(HasSubstr("nan"))) << command << costs;
    }
}

TEST_F(ScheduleCli, InterleavedKindsHaveTwoStagesARankByDefault) {
  for (const char* kind : {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}) {
    const Ended ended =
        penstock(std::string("schedule --ranks 2 --microbatches 4 --format json --kind ") + kind);
    EXPECT_EQ(nlohmann::json::parse(ended.output).at("stages"), 4) << kind;
  }
}

TEST_F(ScheduleCli, FilesMayHaveCommentsAndAByteOrderMark) {
  const Ended ended = penstock(
      "check '" +
      write("commented.csv", "\xef\xbb\xbf# one rank, one microbatch\r\n0F0,0B0 # all of it\r\n") + "'");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("ok; 1 rank, 1 stage, 1 microbatch, 2 actions, compute only"));
}

TEST_F(ScheduleCli, SimulateAsTextAndJson) {
  EXPECT_EQ(penstock("simulate --kind 1F1B --ranks 2 --microbatches 2").output,
            "time 9, bubble 33.33 % of the step, 20.00 % within the ranks' spans\n"
            " rank       busy       idle      first       last  activations      memory\n"
            "    0          6          3          0          9            2         0 B\n"
            "    1          6          3          1          7            1         0 B\n"
            "critical path: 6 actions, 9 computing and 0 in transfer; changes rank 2 times\n"
            "  1F0 on rank 1 started at 1: waited for 0F0 on rank 0, ended at 1\n"
            "  0B1 on rank 0 started at 7: waited for 1B1 on rank 1, ended at 7\n");
  const Ended ended = penstock(
      "simulate --kind 1F1B --ranks 4 --microbatches 8 --cost F=1,I=1,W=1,send=0.1 --memory act=1K --format "
      "json");
  const auto document = nlohmann::json::parse(ended.output);
  for (const char* key : {"time", "bubble", "span_bubble", "per_rank", "critical_path"})
    EXPECT_TRUE(document.contains(key)) << key;
  EXPECT_EQ(document.at("per_rank")[0].at("peak_bytes"), 4096);
}

TEST_F(ScheduleCli, CompareIsSortedByTime) {
  const auto document = nlohmann::json::parse(
      penstock("compare --ranks 4 --microbatches 8 --max-activations 4 --format json").output);
  const auto& kinds = document.at("kinds");
  ASSERT_EQ(kinds.size(), 12U);
  for (std::size_t i = 1; i < kinds.size(); ++i) {
    if (kinds[i - 1].at("fits") == kinds[i].at("fits")) {
      EXPECT_LE(kinds[i - 1].at("time"), kinds[i].at("time"));
    }
  }
  const Ended text = penstock("compare --ranks 3 --microbatches 6");
  EXPECT_THAT(text.output, HasSubstr("not available for this shape: DualPipe"));
}

TEST_F(ScheduleCli, DrawsToFiles) {
  for (const char* format : {"svg", "html", "perfetto"}) {
    const Ended ended = penstock(std::string("schedule --kind zbv --ranks 4 --microbatches 8 --format ") +
                                 format + " -o '" + path("drawing") + "'");
    ASSERT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_GT(read("drawing").size(), 10000U) << format;
  }
  EXPECT_TRUE(nlohmann::json::accept(read("drawing")));
}

}  // namespace schedule_cli_test
}  // namespace penstock::test
