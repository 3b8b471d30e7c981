// The command line: help, wrong flags, exit codes.
#include <gtest/gtest.h>

#include "tests/command.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace cli_test {

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments);
}

TEST(Cli, HelpOfEveryCommandHasAnExample) {
  for (const char* command : {"", "doctor", "launch"}) {
    const Ended ended = penstock(std::string(command) + " --help");
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_TRUE(has_text(ended.output, "Example")) << command;
  }
  EXPECT_TRUE(has_text(penstock("--version").output, "0."));
}

TEST(Cli, WrongUsageIsExitCode2AndSaysWhatIsExpected) {
  EXPECT_EQ(penstock("").exit_code, 2);
  const Ended unknown = penstock("doctr");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_TRUE(has_text(unknown.output, "did you mean doctor?"));
  const Ended flag = penstock("doctor --timeout soon");
  EXPECT_EQ(flag.exit_code, 2);
  EXPECT_TRUE(has_text(flag.output, "--timeout"));
  EXPECT_EQ(penstock("launch -n 0 -- true").exit_code, 2);
  EXPECT_EQ(penstock("launch -n 2").exit_code, 2);
}

TEST(Cli, UnknownFlagsAreEscapedAndTheNearestIsNamed) {
  const Ended ended = penstock("doctor --timout 3");
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, "did you mean --timeout?"));
  const Ended binary = penstock("doctor \"$(printf -- '--\\033[31m')\"");
  EXPECT_EQ(binary.exit_code, 2);
  EXPECT_TRUE(has_text(binary.output, "--\\x1b[31m"));
  EXPECT_EQ(binary.output.find('\033'), std::string::npos);
}

TEST(Cli, MalformedEnvironmentIsNamed) {
  const Ended ended = run_command("RANK=x WORLD_SIZE=2 '" + environment("PENSTOCK_BIN") +
                                  "/penstock' doctor --probe cpu --report /dev/null");
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "RANK"));
}

TEST(Cli, LaunchPassesTheExitCodeOn) {
  EXPECT_EQ(penstock("launch -n 2 -- sh -c 'exit 7'").exit_code, 7);
  EXPECT_EQ(penstock("launch -n 2 -- sh -c 'test $WORLD_SIZE = 2'").exit_code, 0);
}

TEST(Cli, DoctorPassesOnThisMachine) {
  const Ended ended =
      run_command("'" + environment("PENSTOCK_BIN") + "/penstock' doctor", std::chrono::seconds(110));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "all checks passed"));
  EXPECT_TRUE(has_text(ended.output, "1 thread ")) << ended.output;
}

}  // namespace cli_test
}  // namespace penstock::test
