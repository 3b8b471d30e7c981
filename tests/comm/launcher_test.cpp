// The launcher as users run it: real processes, real signals, every run under a deadline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <set>
#include <sstream>

#include "penstock/comm/launch/launch_cores.h"
#include "tests/comm/launcher_harness.h"
#include "tests/pseudo_terminal.h"

namespace penstock::comm::launcher_test {
namespace launcher_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::map<std::string, std::string> variables_of(const std::string& text, int rank) {
  std::map<std::string, std::string> variables;
  const std::string prefix = "[rank " + std::to_string(rank) + "] ";
  for (const std::string& line : lines_of(text))
    if (line.starts_with(prefix))
      if (const auto equal = line.find('='); equal != std::string::npos)
        variables[line.substr(prefix.size(), equal - prefix.size())] = line.substr(equal + 1);
  return variables;
}

TEST(LauncherEnvironment, SetsTheRankOfEachProcess) {
  Launcher run({"-n", "3", "--", "env"},
               {{"RANK", "9"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"KEPT", "yes"}});
  ASSERT_EQ(run.wait(), 0) << run.err();
  std::set<std::string> ports;
  for (int rank = 0; rank < 3; ++rank) {
    auto env = variables_of(run.out(), rank);
    EXPECT_EQ(env["RANK"], std::to_string(rank));
    EXPECT_EQ(env["LOCAL_RANK"], std::to_string(rank));
    EXPECT_EQ(env["WORLD_SIZE"], "3");
    EXPECT_EQ(env["LOCAL_WORLD_SIZE"], "3");
    EXPECT_EQ(env["MASTER_ADDR"], "127.0.0.1");
    EXPECT_EQ(env["PENSTOCK_RESTART_COUNT"], "0");
    EXPECT_EQ(env["KEPT"], "yes");
    EXPECT_FALSE(env.contains("TORCHELASTIC_USE_AGENT_STORE"));
    const std::string threads = std::to_string(std::max(1, available_cores() / 3));
    for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
      EXPECT_EQ(env[name], threads) << name;
    for (const char* name :
         {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MIMALLOC_PURGE_DELAY", "GOMP_SPINCOUNT"})
      EXPECT_FALSE(env[name].empty()) << name;
    ports.insert(env["MASTER_PORT"]);
  }
  ASSERT_EQ(ports.size(), 1u);
  EXPECT_GE(std::stoi(*ports.begin()), 1024);
  EXPECT_EQ(count_of(run.out(), "] RANK="), 3) << "a variable must not occur twice";
}

TEST(LauncherEnvironment, KeepsTheUsersThreadsAndPort) {
  Launcher run({"-n", "1", "--port", "14999", "--", "env"},
               {{"OMP_NUM_THREADS", "7"}, {"MKL_NUM_THREADS", ""}, {"MIMALLOC_PURGE_DELAY", "5"}});
  ASSERT_EQ(run.wait(), 0) << run.err();
  auto env = variables_of(run.out(), 0);
  EXPECT_EQ(env["OMP_NUM_THREADS"], "7");
  EXPECT_EQ(env["OPENBLAS_NUM_THREADS"], "7") << "one count for all libraries";
  EXPECT_EQ(env["MKL_NUM_THREADS"], "7") << "an empty variable is not set, and LibTorch obeys this one first";
  EXPECT_EQ(env["MIMALLOC_PURGE_DELAY"], "5");
  EXPECT_EQ(env["MASTER_PORT"], "14999");
}

// Like ranks of mpirun: the variables must be set before the libraries that read them are loaded.
TEST(LauncherEnvironment, ARankOfAnotherLauncherRestartsItself) {
  const std::string driver = std::getenv("PENSTOCK_LAUNCHER_DRIVER");
  const std::vector<std::string> command = {"-n",
                                            "1",
                                            "--no-prefix",
                                            "--",
                                            "env",
                                            "-u",
                                            "PENSTOCK_LAUNCH_ID",
                                            "-u",
                                            "OMP_NUM_THREADS",
                                            "-u",
                                            "MKL_NUM_THREADS",
                                            "-u",
                                            "GOMP_SPINCOUNT",
                                            driver,
                                            "rank",
                                            "a b",
                                            "c"};
  Launcher run(command);
  ASSERT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.out(), "<a b><c> OMP_NUM_THREADS=" + std::to_string(std::max(1, available_cores() / 4)) +
                           " GOMP_SPINCOUNT=2000\n");
}

TEST(LauncherEnvironment, PassesArgumentsUnchanged) {
  Launcher run({"-n", "1", "--no-prefix", "--", "printf", "<%s>", "-n", "", "[a,b]", "{}", "--help", "--",
                "a b", "launch"});
  ASSERT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.out(), "<-n><><[a,b]><{}><--help><--><a b><launch>\n");
}

TEST(LauncherFailure, ReportsTheFirstFailedRankAndEndsTheOthers) {
  Launcher run(script({"-n", "4", "--grace", "0.3"}, "[ $RANK = 2 ] && exit 7; exec sleep 100"));
  EXPECT_EQ(run.wait(), 7);
  EXPECT_THAT(run.err(),
              ContainsRegex("rank 2 failed first: exit code 7 after [0-9.]+ s; 3 ranks still running"));
  EXPECT_THAT(run.err(), HasSubstr("summary: rank 2: exit code 7"));
  EXPECT_THAT(run.err(), HasSubstr("summary: ranks 0, 1, 3: killed by SIGTERM (sent by the launcher)"));
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

TEST(LauncherFailure, LetsTheOthersEndOnTheirOwn) {
  // Rank 0 fails later with another code: the first failure counts.
  Launcher run(script({"-n", "2"}, "[ $RANK = 1 ] && exit 5; sleep 0.5; echo lost rank 1; exit 3"));
  EXPECT_EQ(run.wait(), 5);
  EXPECT_THAT(run.out(), HasSubstr("[rank 0] lost rank 1\n"));
  EXPECT_THAT(run.err(), HasSubstr("summary: rank 0: exit code 3"));
  EXPECT_THAT(run.err(), Not(HasSubstr("sending SIGTERM")));
}

// The grace is for ranks that can end on their own.
TEST(LauncherFailure, DoesNotWaitForStoppedRanks) {
  const auto begin = std::chrono::steady_clock::now();
  Launcher run(script({"-n", "3", "--grace", "100"},
                      "[ $RANK = 1 ] && kill -STOP $$; sleep 1; [ $RANK = 0 ] && exit 5; exit 0"));
  EXPECT_EQ(run.wait(), 5);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(40));
  EXPECT_THAT(run.err(), HasSubstr("summary: rank 1: killed by SIGKILL (sent by the launcher)"));
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

TEST(LauncherFailure, LastOutputOfARankPrecedesTheLaunchersLine) {
  Launcher run(script({"-n", "1"}, "echo last words >&2; exit 1"));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_LT(run.err().find("last words"), run.err().find("failed first")) << run.err();
}

TEST(LauncherFailure, KillsARankThatIgnoresSigterm) {
  Launcher run(script({"-n", "2", "--grace", "0.1"},
                      "[ $RANK = 1 ] && { sleep 1; exit 4; }; trap '' TERM; while :; do sleep 0.1; done"));
  EXPECT_EQ(run.wait(), 4);
  EXPECT_THAT(run.err(), HasSubstr("summary: rank 0: killed by SIGKILL (sent by the launcher)"));
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

TEST(LauncherFailure, KillOfOneRankEndsAll) {
  Launcher run(script({"-n", "3", "--grace", "0.2"}, "echo pid=$$; sleep 100 & wait"));
  ASSERT_TRUE(run.shows("pid=", 3)) << run.err();
  kill(std::stoi(variables_of(run.out(), 1)["pid"]), SIGKILL);
  EXPECT_EQ(run.wait(), 128 + SIGKILL);
  EXPECT_THAT(run.err(), HasSubstr("rank 1 failed first: killed by SIGKILL after"));
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

TEST(LauncherOrphans, BackgroundProcessOfARankNeitherHoldsTheLauncherNorSurvives) {
  Launcher run(script({"-n", "2"}, "sleep 100 & echo done"));
  EXPECT_EQ(run.wait(20s), 0) << run.err();
  EXPECT_EQ(count_of(run.out(), "done"), 2);
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

TEST(LauncherOrphans, BackgroundProcessOfAnEndedRankIsKilledWhileOthersRun) {
  Launcher run(script({"-n", "2"},
                      "[ $RANK = 0 ] && { sleep 99 >/dev/null 2>&1 & echo left=$!; exit 0; }; echo ready; "
                      "sleep 9; echo end"));
  ASSERT_TRUE(run.shows("ready"));
  ASSERT_TRUE(run.shows("left="));
  const auto sleeps = [&] {
    for (const std::string& process : run.processes())
      if (process.ends_with(": sleep 99 ")) return true;
    return false;
  };
  EXPECT_TRUE(eventually([&] { return !sleeps(); }, 6s));
  EXPECT_THAT(run.out(), Not(HasSubstr("end")));
  EXPECT_EQ(run.wait(), 0);
}

TEST(LauncherOrphans, ProcessThatLeftTheGroupIsFoundAndKilled) {
  Launcher run(script({"-n", "2"}, "setsid sh -c 'sleep 100 & echo away; sleep 100' & sleep 2; echo done"));
  EXPECT_EQ(run.wait(20s), 0) << run.err();
  EXPECT_EQ(count_of(run.out(), "away"), 2);
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

TEST(LauncherOrphans, KillingTheLauncherEndsRanksAndTheirChildren) {
  Launcher run(script({"-n", "3"}, "sleep 100 & echo ready; wait"));
  ASSERT_TRUE(run.shows("ready", 3)) << run.err();
  ASSERT_GE(run.processes().size(), 7u) << "launcher, three shells and their children must be seen";
  run.send(SIGKILL);
  EXPECT_EQ(run.wait(), -SIGKILL);
  EXPECT_TRUE(run.nothing_left()) << ::testing::PrintToString(run.processes());
}

class LauncherSignal : public ::testing::TestWithParam<int> {};

TEST_P(LauncherSignal, IsPassedOnToEveryRank) {
  const std::string name = GetParam() == SIGINT ? "INT" : GetParam() == SIGTERM ? "TERM" : "HUP";
  Launcher run(script({"-n", "2", "--restarts", "3"},
                      "trap 'echo caught; exit 9' " + name + "; echo ready; while :; do sleep 0.05; done"));
  ASSERT_TRUE(run.shows("ready", 2)) << run.err();
  run.send(GetParam());
  EXPECT_EQ(run.wait(), 9);
  EXPECT_EQ(count_of(run.out(), "caught"), 2);
  EXPECT_THAT(run.err(), HasSubstr("SIG" + name + " received: passed on to 2 ranks"));
  EXPECT_EQ(count_of(run.out(), "ready"), 2) << "no restart after a stop";
  EXPECT_THAT(run.err(), Not(HasSubstr("failed first")));
  EXPECT_TRUE(run.nothing_left());
}

INSTANTIATE_TEST_SUITE_P(Stops, LauncherSignal, ::testing::Values(SIGINT, SIGTERM, SIGHUP));

TEST(LauncherStop, SucceedsIfAllRanksSucceed) {
  Launcher run(script({"-n", "2"}, "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"));
  ASSERT_TRUE(run.shows("ready", 2));
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 0);
}

TEST(LauncherStop, GraceEndsInSigkill) {
  Launcher run(
      script({"-n", "2", "--grace", "0.3"}, "trap '' TERM; echo ready; while :; do sleep 0.05; done"));
  ASSERT_TRUE(run.shows("ready", 2));
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGKILL);
  EXPECT_TRUE(run.nothing_left());
}

TEST(LauncherStop, SecondInterruptKillsAtOnceButADoubledOneDoesNot) {
  Launcher run(script({"-n", "2", "--grace", "60"},
                      "trap '' INT; trap 'echo term' TERM; echo ready; while :; do sleep 0.05; done"));
  ASSERT_TRUE(run.shows("ready", 2));
  run.send(SIGTERM);
  run.send(SIGINT);  // as from a runner that signals the process and then its group
  ASSERT_TRUE(run.shows("term", 2));
  std::this_thread::sleep_for(400ms);
  EXPECT_EQ(run.processes().empty(), false);
  EXPECT_THAT(run.err(), Not(HasSubstr("SIGKILL")));
  run.send(SIGINT);
  EXPECT_EQ(run.wait(5s), 128 + SIGKILL);
  EXPECT_THAT(run.err(), HasSubstr("second SIGINT"));
  EXPECT_TRUE(run.nothing_left());
}

TEST(LauncherRestart, StopsAtTheFirstSuccessfulAttempt) {
  Launcher run(script({"-n", "2", "--restarts", "5", "--grace", "0.2"},
                      "echo attempt $PENSTOCK_RESTART_COUNT port=$MASTER_PORT; [ $RANK = 0 ] || [ "
                      "$PENSTOCK_RESTART_COUNT -ge 2 ]"));
  EXPECT_EQ(run.wait(), 0);
  for (const char* attempt : {"attempt 0", "attempt 1", "attempt 2"})
    EXPECT_EQ(count_of(run.out(), attempt), 2);
  EXPECT_THAT(run.out(), Not(HasSubstr("attempt 3")));
  EXPECT_THAT(
      run.err(),
      ContainsRegex("attempt 1 of 6 failed \\(rank 1, exit code 1 after [0-9.]+ s\\); starting attempt 2"));
  EXPECT_THAT(run.err(), HasSubstr("attempt 2 of 6 failed"));
}

TEST(LauncherRestart, GivesUpWithTheLastCode) {
  Launcher run(script({"-n", "1", "--restarts", "1"}, "exit $((40 + PENSTOCK_RESTART_COUNT))"));
  EXPECT_EQ(run.wait(), 41);
  EXPECT_THAT(run.err(), HasSubstr("attempt 2 of 2 failed (rank 0, exit code 41"));
  EXPECT_THAT(run.err(), HasSubstr("no restart is left"));
}

TEST(LauncherOutput, GoesToTheStreamItCameFromWithThePrefixOfItsRank) {
  Launcher run(script({"-n", "2"}, "echo out $RANK; echo err $RANK >&2; printf end"));
  ASSERT_EQ(run.wait(), 0);
  for (const char* line : {"[rank 0] out 0\n", "[rank 1] out 1\n", "[rank 0] end\n", "[rank 1] end\n"})
    EXPECT_THAT(run.out(), HasSubstr(line));
  EXPECT_THAT(run.err(), HasSubstr("[rank 0] err 0\n"));
  EXPECT_THAT(run.err(), Not(HasSubstr("out")));
  EXPECT_THAT(run.out(), Not(HasSubstr("err")));
  EXPECT_THAT(run.out(), Not(HasSubstr("\x1b"))) << "no colours in a file";
}

TEST(LauncherOutput, KeepsLinesWhole) {
  // Ranks write in small pieces, so that an unbuffered copy would mix them.
  Launcher run(script({"-n", "4"},
                      "i=0; while [ $i -lt 60 ]; do for p in 1 2 3 4 5 6 7 8; do printf '%0500d' $RANK; "
                      "done; echo; i=$((i+1)); done"));
  ASSERT_EQ(run.wait(), 0);
  std::map<std::string, int> seen;
  for (const std::string& line : lines_of(run.out())) ++seen[line];
  ASSERT_EQ(seen.size(), 4u);
  for (const auto& [line, times] : seen) {
    EXPECT_EQ(line.size(), 9u + 4000u);
    EXPECT_EQ(times, 60);
  }
}

TEST(LauncherOutput, KeepsLinesWholeWhereBothStreamsAreOnePipe) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Launcher run(script({"-n", "2"},
                      "i=0; while [ $i -lt 100 ]; do printf '%09000d\\n' 1; printf '%09000d\\n' 2 >&2; "
                      "i=$((i+1)); done"),
               {}, {ends[1], ends[1]});
  close(ends[1]);
  std::this_thread::sleep_for(500ms);  // lets both streams pile up, so that a pipe's worth ends within a line
  std::string text;
  char buffer[65536];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  close(ends[0]);
  ASSERT_EQ(run.wait(), 0);
  std::map<std::string, int> seen;
  for (const std::string& line : lines_of(text)) ++seen[line];
  EXPECT_EQ(seen.size(), 4u);
  for (const auto& [line, times] : seen) EXPECT_EQ(times, 100) << line.size();
}

TEST(LauncherOutput, LongLinesAreShownInPiecesAndLoggedWhole) {
  TempFolder folder;
  Launcher run(script({"-n", "1", "--log-dir", (folder / "logs").string()},
                      "head -c 200000 /dev/zero | tr '\\0' x; echo; printf tail"));
  ASSERT_EQ(run.wait(), 0);
  std::string joined;
  for (const std::string& line : lines_of(run.out())) {
    EXPECT_LE(line.size(), 64u * 1024 + 9);
    joined += line.substr(9);
  }
  EXPECT_EQ(joined, std::string(200000, 'x') + "tail");
  EXPECT_EQ(read_file(folder / "logs/attempt0/rank0.log"), std::string(200000, 'x') + "\ntail");
}

TEST(LauncherOutput, MoreThanAPipeHoldsArrivesThroughASlowReader) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Launcher run(script({"-n", "2"}, "head -c 4000000 /dev/zero | tr '\\0' x | fold -w 999"), {},
               {ends[1], -1});
  close(ends[1]);
  std::this_thread::sleep_for(700ms);  // the pipes are full by now and the ranks wait
  std::size_t bytes = 0, breaks = 0;
  char buffer[65536];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;)
    for (ssize_t i = 0; i < got; ++i) buffer[i] == 'x' ? ++bytes : breaks += buffer[i] == '\n';
  close(ends[0]);
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(bytes, 8'000'000u);
  EXPECT_EQ(breaks, 2u * 4005u);
}

TEST(LauncherOutput, StuckReaderDoesNotHoldUpSignalsAndDeadlines) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Launcher run(script({"-n", "2", "--grace", "0.2"},
                      "trap '' TERM; echo ready >&2; while :; do echo "
                      "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"),
               {}, {ends[1], -1});
  close(ends[1]);
  ASSERT_TRUE(run.shows("ready", 2));
  std::this_thread::sleep_for(500ms);
  run.send(SIGTERM);
  ASSERT_TRUE(run.shows("sending SIGKILL")) << run.err();
  EXPECT_TRUE(eventually([&] { return run.processes().size() <= 2; }, 5s))
      << "only the launcher and its guard wait for the reader";
  close(ends[0]);
  EXPECT_EQ(run.wait(5s), 128 + SIGKILL);
  EXPECT_TRUE(run.nothing_left());
}

TEST(LauncherOutput, ReaderThatLeavesEndsTheRanks) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Launcher run(script({"-n", "2", "--grace", "1"}, "while :; do echo x; sleep 0.05; done"), {},
               {ends[1], -1});
  close(ends[1]);
  char first = 0;
  EXPECT_EQ(read(ends[0], &first, 1), 1);
  close(ends[0]);
  EXPECT_EQ(run.wait(), 128 + SIGPIPE);
  EXPECT_TRUE(run.nothing_left());
}

TEST(LauncherOutput, ColoursThePrefixOnATerminalOnly) {
  if (!test::has_pseudo_terminals()) GTEST_SKIP() << "this system has no pseudo terminals";
  const auto on_terminal = [](const std::map<std::string, std::string>& environment,
                              std::vector<std::string> options) {
    const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0)
      throw std::runtime_error("no pseudo terminal");
    const int slave = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
    std::string text;
    {
      Launcher run(script(std::move(options), "echo hello"), environment, {slave, -1});
      EXPECT_EQ(run.wait(), 0) << run.err();
    }
    char buffer[4096];
    const ssize_t got = read(master, buffer, sizeof buffer);
    if (got > 0) text.assign(buffer, static_cast<std::size_t>(got));
    close(slave);
    close(master);
    return text;
  };
  EXPECT_THAT(on_terminal({{"TERM", "xterm"}}, {"-n", "1"}), HasSubstr("\x1b[36m[rank 0]\x1b[0m hello"));
  EXPECT_EQ(on_terminal({{"TERM", "xterm"}, {"NO_COLOR", "1"}}, {"-n", "1"}), "[rank 0] hello\r\n");
  EXPECT_EQ(on_terminal({{"TERM", "xterm"}}, {"-n", "1", "--no-color"}), "[rank 0] hello\r\n");
  EXPECT_EQ(on_terminal({{"TERM", "dumb"}}, {"-n", "1"}), "[rank 0] hello\r\n");
}

TEST(LauncherOutput, LogsEveryAttemptOfEveryRank) {
  TempFolder folder;
  const std::string logs = (folder / "a/b").string();
  Launcher run(script({"-n", "2", "--restarts", "1", "--log-dir", logs},
                      "echo out $RANK $PENSTOCK_RESTART_COUNT; echo err >&2; exit 1"));
  EXPECT_EQ(run.wait(), 1);
  for (int attempt = 0; attempt < 2; ++attempt)
    for (int rank = 0; rank < 2; ++rank) {
      const std::string path =
          logs + "/attempt" + std::to_string(attempt) + "/rank" + std::to_string(rank) + ".log";
      const std::string line = "out " + std::to_string(rank) + " " + std::to_string(attempt) + "\n";
      EXPECT_THAT(read_file(path), ::testing::AnyOf(line + "err\n", "err\n" + line)) << path;
    }
}

TEST(LauncherUsage, RefusesWithCodeAndRemedy) {
  TempFolder folder;
  const auto file = [&](const char* name, const std::string& text, mode_t mode) {
    std::ofstream(folder / name) << text;
    chmod((folder / name).c_str(), mode);
    return (folder / name).string();
  };
  const std::string plain = file("plain", "#!/bin/sh\n", 0644);
  const std::string garbage = file("garbage", "not a program", 0755);
  const std::string lost = file("lost", "#!/no/such/interpreter\n", 0755);
  const std::string blocked = file("blocked", "", 0644) + "/logs";
  struct Case {
    std::vector<std::string> arguments;
    int code;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases = {
      {{"-n", "2", "--", "no_such_program_here"},
       127,
       {"\"no_such_program_here\"", "PATH", "check the spelling"}},
      {{"-n", "2", "--", "./no/such"}, 127, {"\"./no/such\"", "No such file", "check the path"}},
      {{"-n", "2", "--", "/tmp"}, 126, {"\"/tmp\" is a folder"}},
      {{"-n", "2", "--", plain}, 126, {plain, "not executable", "chmod +x"}},
      {{"-n", "2", "--", garbage}, 126, {garbage, "cannot be executed", "#!/bin/sh"}},
      {{"-n", "2", "--restarts", "3", "--", lost}, 127, {lost, "interpreter"}},
      {{"-n", "0", "--", "true"}, 2, {"-n, --ranks: got \"0\"", "1 to 1024"}},
      {{"-n", "-3", "--", "true"}, 2, {"got \"-3\""}},
      {{"-n", "100000", "--", "true"}, 2, {"got \"100000\"", "1 to 1024"}},
      {{"-n", "two", "--", "true"}, 2, {"two"}},
      {{"--", "true"}, 2, {"-n", "penstock launch -n 4 -- ./train"}},
      {{"-n", "2"}, 2, {"no program", "penstock launch -n 4 -- ./train"}},
      {{"-n", "2", "--"}, 2, {"no program", "penstock launch -n 4 -- ./train"}},
      {{"-n", "2", "true"}, 2, {"-- is missing", "\"true\"", "penstock launch -n 4 -- ./train"}},
      {{"-n", "2", "--grace", "-1", "--", "true"}, 2, {"--grace", "-1"}},
      {{"-n", "2", "--restarts", "-1", "--", "true"}, 2, {"restarts", "-1"}},
      {{"-n", "2", "--port", "70000", "--", "true"}, 2, {"70000", "65535"}},
      {{"-n", "2", "--log-dir", blocked, "--", "true"}, 2, {blocked, "--log-dir"}},
  };
  for (const Case& wrong : cases) {
    Launcher run(wrong.arguments);
    EXPECT_EQ(run.wait(5s), wrong.code) << ::testing::PrintToString(wrong.arguments);
    for (const std::string& text : wrong.says)
      EXPECT_THAT(run.err(), HasSubstr(text)) << ::testing::PrintToString(wrong.arguments);
    EXPECT_THAT(run.err(), Not(HasSubstr("failed first")));
    EXPECT_TRUE(run.nothing_left());
  }
}

TEST(LauncherUsage, HelpShowsAnExample) {
  Launcher run({"--help"});
  EXPECT_EQ(run.wait(), 0);
  EXPECT_THAT(run.out(), HasSubstr("penstock launch -n 4 -- ./train"));
  EXPECT_THAT(run.out(), HasSubstr("-n N [OPTIONS] -- program [arguments...]"));
}

}  // namespace launcher_test
}  // namespace penstock::comm::launcher_test
