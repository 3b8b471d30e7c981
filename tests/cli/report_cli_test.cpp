// Tests of the command `penstock report`.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/synthetic_run.h"

namespace penstock::test {
namespace report_cli_test {

Ended penstock(const std::string& arguments) {
  return run_command("'" + environment("PENSTOCK_BIN") + "/penstock' " + arguments);
}

TEST(ReportCli, HelpHasAnExample) {
  const Ended ended = penstock("report --help");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(has_text(ended.output, "penstock report runs/first"));
}

TEST(ReportCli, OneRun) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  const Ended ended = penstock("report '" + (folder / "first").string() + "'");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(has_text(ended.output, "first: finished, 200 of 200 steps"));
  EXPECT_TRUE(has_text(ended.output, "  validation  "));
  EXPECT_TRUE(has_text(ended.output, "  pipeline    step 100: bubble "));
  EXPECT_TRUE(has_text(ended.output, "report: " + (folder / "first/report.html").string()));
  EXPECT_TRUE(std::filesystem::exists(folder / "first/report.html"));
}

TEST(ReportCli, SeveralRuns) {
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  make_run_folder(folder / "second", {.last_step = 60, .ends = false});
  const Ended ended =
      penstock("report '" + (folder / "first").string() + "' '" + (folder / "second").string() + "' --out '" +
               (folder / "both.html").string() + "'");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(
      has_text(ended.output, "second: unfinished (killed, failed or still running), 60 of 200 steps"));
  EXPECT_TRUE(std::filesystem::exists(folder / "both.html"));
  EXPECT_FALSE(std::filesystem::exists(folder / "first/report.html"));
}

TEST(ReportCli, AFolderWithoutARunIsAUsageError) {
  const ScratchFolder folder;
  EXPECT_EQ(penstock("report").exit_code, 2);
  const Ended ended = penstock("report '" + folder.path().string() + "'");
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, "expected a folder with metrics.jsonl"));
  make_run_folder(folder / "first", {});
  EXPECT_EQ(penstock("report '" + (folder / "first").string() + "' --out /nonexistent/page.html").exit_code,
            2);
}

}  // namespace report_cli_test
}  // namespace penstock::test
