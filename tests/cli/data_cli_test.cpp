// Tests of the command penstock data.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>

#include "penstock/cli/common/commands.h"
#include "penstock/errors.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/token_file_bytes.h"

namespace penstock::test {
namespace data_cli_test {

// Runs the command in this process, with the exit codes of `penstock`: starting the program loads all of
// LibTorch, which takes seconds on a busy machine.
Ended penstock(const std::string& arguments) {
  CLI::App app{"Penstock"};
  app.name("penstock");
  app.require_subcommand(1);
  cli::CommandOutcome outcome;
  cli::add_data_command(app, outcome);
  Ended ended;
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  try {
    app.parse("penstock " + arguments, true);
    ended.exit_code = outcome.exit_code;
  } catch (const CLI::ParseError& error) {
    ended.exit_code = app.exit(error) == 0 ? 0 : 2;
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    ended.exit_code = 2;
  }
  ended.output = ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
  return ended;
}

TEST(DataCli, IsACommandOfTheProgram) {
  const Ended ended = run_command("'" + environment("PENSTOCK_BIN") + "/penstock' data show /nowhere/at/all");
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, "/nowhere/at/all: folder of token shards"));
}

TEST(DataCli, HelpHasAnExample) {
  for (const char* command : {"data", "data make", "data show"}) {
    const Ended ended = penstock(std::string(command) + " --help");
    EXPECT_EQ(ended.exit_code, 0);
    EXPECT_TRUE(has_text(ended.output, "Example"));
    EXPECT_TRUE(has_text(ended.output, std::string("penstock ") + command));
  }
}

TEST(DataCli, CountsUseSingularAndPlural) {
  const ScratchFolder folder;
  folder.write("src/a.h", "int a;");
  const Ended ended = penstock("data make --out '" + (folder / "data").string() + "' --source '" +
                               (folder / "src").string() + "'");
  EXPECT_TRUE(has_text(ended.output, "7 tokens of 1 file (6 B) in 1 shard\n"));
}

// Some headers of every system are empty; users who did not choose the files are not warned about them.
TEST(DataCli, TheDefaultFilesAreUsedWithoutWarnings) {
  const ScratchFolder folder;
  const Ended ended = penstock("data make --out '" + (folder / "data").string() + "' --cap-bytes 200K");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_FALSE(has_text(ended.output, "skipped"));
}

TEST(DataCli, SizesAreNotNegative) {
  const ScratchFolder folder;
  folder.write("src/a.h", "int a;");
  for (const char* flag : {"--cap-bytes", "--max-file-bytes", "--shard-tokens"}) {
    const Ended ended = penstock("data make --out '" + (folder / "data").string() + "' --source '" +
                                 (folder / "src").string() + "' " + flag + " -1");
    EXPECT_EQ(ended.exit_code, 2) << flag;
    EXPECT_TRUE(has_text(ended.output, std::string(flag) + ": got \"-1\""));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "data"));
}

TEST(DataCli, MakesAndShows) {
  const ScratchFolder folder;
  folder.write("src/a.h", "int a;");
  folder.write("src/b.h", "int b;");
  folder.write("src/c.txt", "no");
  const std::string out = (folder / "data").string();
  const std::string make =
      "data make --out '" + out + "' --source '" + (folder / "src").string() + "' --extensions .h";
  Ended ended = penstock(make);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "14 tokens of 2 files (12 B) in 1 shard"));
  ended = penstock("data show '" + out + "'");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "shard-00000.tokens"));
  EXPECT_TRUE(has_text(ended.output, "ok"));
  EXPECT_TRUE(has_text(ended.output, "1 in total"));
  ended = penstock(make);
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, "--overwrite"));
  EXPECT_EQ(penstock(make + " --overwrite").exit_code, 0);

  // A changed token byte is reported in the table, in a message and by the exit code.
  const auto shard = folder / "data/shard-00000.tokens";
  auto bytes = read_bytes(shard);
  bytes[75] ^= 1;
  write_bytes(shard, bytes);
  ended = penstock("data show '" + out + "'");
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(has_text(ended.output, "DAMAGED"));
  EXPECT_TRUE(has_text(ended.output, "bytes 72 to"));
}

TEST(DataCli, ShowsTokenFiles) {
  const ScratchFolder folder;
  std::vector<std::uint32_t> tokens(1000, 5);
  write_bytes(folder / "gpt2.bin", gpt2_file(tokens));
  write_bytes(folder / "bare.bin", bare_file(tokens));
  const auto quoted = [&](const char* name) { return "'" + (folder / name).string() + "'"; };
  Ended ended = penstock("data show " + quoted("gpt2.bin"));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "50257  ok"));
  EXPECT_TRUE(
      has_text(ended.output, "validation at a fraction of 0.05: 50 tokens, the ends of 1 document\n"));
  EXPECT_EQ(penstock("data show " + quoted("gpt*.bin")).exit_code, 0);
  ended = penstock("data show " + quoted("bare.bin"));
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, "data.format = \"uint16\""));
  EXPECT_EQ(penstock("data show " + quoted("bare.bin") + " --format uint16").exit_code, 0);
  ended = penstock("data show " + quoted("bare.bin") + " --format uint16 --vocabulary 5");
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(has_text(ended.output, "DAMAGED"));
  EXPECT_TRUE(has_text(ended.output, "token 0: got 5"));
}

TEST(DataCli, AFileLargerThanAMebibyteIsUsed) {
  const ScratchFolder folder;
  folder.write("input.txt", std::string(1'100'000, 'a'));
  const Ended ended = penstock("data make --out '" + (folder / "data").string() + "' --source '" +
                               (folder / "input.txt").string() + "'");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "1100001 tokens of 1 file ("));
}

TEST(DataCli, TheDefaultSources) {
  const ScratchFolder folder;
  const Ended ended = penstock("data make --out '" + (folder / "data").string() + "' --cap-bytes 1MB");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "beyond the cap"));
}

TEST(DataCli, BadUse) {
  const ScratchFolder folder;
  folder.write("src/a.h", "int a;");
  folder.write("src/empty.h", "");
  const std::string make = "data make --out '" + (folder / "data").string() + "'";
  const std::string source = " --source '" + (folder / "src").string() + "'";
  Ended ended = penstock(make + source);
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(has_text(ended.output, "empty.h"));
  EXPECT_TRUE(has_text(ended.output, "--skip-bad-files"));
  EXPECT_FALSE(std::filesystem::exists(folder / "data"));
  ended = penstock(make + source + " --skip-bad-files");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(has_text(ended.output, "skipped " + (folder / "src/empty.h").string()));
  EXPECT_EQ(penstock("data make").exit_code, 2);
  EXPECT_EQ(penstock("data").exit_code, 2);
  EXPECT_EQ(penstock(make + " --source /nowhere/at/all").exit_code, 2);
  EXPECT_EQ(penstock(make + " --cap-bytes many").exit_code, 2);
  EXPECT_EQ(penstock("data show /nowhere/at/all").exit_code, 2);
  EXPECT_EQ(penstock("data show '" + folder.path().string() + "'").exit_code, 2);
  EXPECT_EQ(penstock("data show '" + (folder / "data").string() + "' --validation-fraction 2").exit_code, 2);
}

}  // namespace data_cli_test
}  // namespace penstock::test
