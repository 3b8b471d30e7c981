// Tests of the command `penstock trace`.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "penstock/pipeline/report/step_trace.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/pipeline/simulated_trace.h"

namespace penstock::test {
namespace trace_cli_test {

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments);
}

class TraceCli : public ::testing::Test {
 protected:
  ~TraceCli() override { std::filesystem::remove(path_); }
  const std::string path_ = (std::filesystem::temp_directory_path() /
                             ("penstock_trace_cli_" + std::to_string(::getpid()) + ".json"))
                                .string();
};

TEST_F(TraceCli, HelpHasAnExample) {
  const Ended ended = penstock("trace --help");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(has_text(ended.output, "penstock trace step.json"));
}

TEST_F(TraceCli, ShowsMeasuredBesideSimulated) {
  write_trace(simulated_trace("1F1B", 2, 4), path_);
  const Ended ended = penstock("trace '" + path_ + "'");
  EXPECT_EQ(ended.exit_code, 0);
  // 2 stages of 1 and 1.25 ms forward, twice that backward, 0.1 ms between them.
  EXPECT_TRUE(has_text(ended.output, "efficiency 100.0 %"));
  EXPECT_TRUE(has_text(ended.output,
                       "    1           B      4      2.500      2.500      2.500      2.500      2.500\n"));
  EXPECT_TRUE(has_text(ended.output, "transfer: 0.100 ms"));
  EXPECT_TRUE(has_text(ended.output, "greatest delays relative to the simulation:"));
}

TEST_F(TraceCli, CsvHasALinePerAction) {
  write_trace(simulated_trace("1F1B", 2, 4), path_);
  const Ended ended = penstock("trace --csv '" + path_ + "'");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1 + 2 * 8);
  EXPECT_TRUE(has_text(ended.output,
                       "rank,action,begin_ms,end_ms,simulated_begin_ms,simulated_end_ms,delay_ms\n0,0F0,0."
                       "000000,1.000000,0.000000,1.000000,0.000000\n"));
}

TEST_F(TraceCli, AFileWithoutATraceIsAUsageError) {
  std::ofstream(path_) << "{\"traceEvents\": []}";
  const Ended ended = penstock("trace '" + path_ + "'");
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, path_));
  EXPECT_TRUE(has_text(ended.output, "it has no key \"penstock\""));
  EXPECT_EQ(penstock("trace /nonexistent.json").exit_code, 2);
}

}  // namespace trace_cli_test
}  // namespace penstock::test
