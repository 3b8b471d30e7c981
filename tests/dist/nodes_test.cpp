// Launchers on two hosts: who starts what, and what the others hear when something ends.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "tests/command.h"
#include "tests/dist/two_hosts.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"

namespace penstock::test {
namespace nodes_test {

using namespace std::chrono_literals;

std::string worker() { return "'" + environment("PENSTOCK_DIST_WORKER") + "'"; }
std::string tool() { return "'" + environment("PENSTOCK_BIN") + "/penstock'"; }

const TwoHosts& hosts() {
  static const TwoHosts kHosts;
  return kHosts;
}

int next_port() {
  static int port = 27000 + getpid() % 4000;
  return ++port;
}

constexpr const char* kSecret = "PENSTOCK_SECRET=a-secret-of-this-test ";

class Nodes : public ::testing::Test {
 protected:
  void SetUp() override { PENSTOCK_NEEDS_TWO_HOSTS(hosts()); }
};

// A launcher with its options, and a shell script as the program.
std::string launch(const std::string& options, const std::string& script,
                   const std::string& variables = kSecret) {
  return fmt::format("{}{} launch {} -- /bin/sh -c '{}'", variables, tool(), options, script);
}

// Says when ranks 0 and 1 run: each makes a file in a folder that both hosts see.
class BothRanks {
 public:
  // For the shell script of a rank.
  std::string mark() const { return "touch " + folder_.path.string() + "/$RANK"; }
  // For a shell beside the launchers.
  std::string await_in_shell() const {
    return fmt::format("for i in $(seq 600); do [ -e {0}/0 ] && [ -e {0}/1 ] && break; sleep 0.1; done",
                       folder_.path.string());
  }
  void await() const {
    const auto exists = [&](const char* rank) { return std::filesystem::exists(folder_.path / rank); };
    for (int i = 0; i < 6000 && !(exists("0") && exists("1")); ++i) std::this_thread::sleep_for(10ms);
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(Nodes, RanksAreNumberedOverHosts) {
  const std::string place = fmt::format("alpha:{}", next_port());
  const std::string script =
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR "
      "$(hostname)";
  const auto [alpha, beta] = hosts().run(launch("--nnodes 2 -n 2 --node-rank 0 --rdzv " + place, script),
                                         launch("--nnodes 2 -n 1 --node-rank 1 --rdzv " + place, script));
  ASSERT_EQ(alpha.exit_code, 0) << alpha.output;
  ASSERT_EQ(beta.exit_code, 0) << beta.output;
  EXPECT_TRUE(has_text(alpha.output, "[rank 0] 0 0 3 2 0 2 alpha alpha"));
  EXPECT_TRUE(has_text(alpha.output, "[rank 1] 1 1 3 2 0 2 alpha alpha"));
  EXPECT_TRUE(has_text(beta.output, "[rank 2] 2 0 3 1 1 2 alpha beta"));
  EXPECT_TRUE(has_text(alpha.output, "3 ranks on 2 hosts: alpha (ranks 0-1), beta (rank 2)"));
}

TEST_F(Nodes, RanksMeetAndUseSharedMemoryWithinAHost) {
  const std::string command =
      fmt::format("{}PENSTOCK_P2P={} {} launch --nnodes 2 -n 2 --rdzv 10.77.0.1:{} -- {} everything", kSecret,
                  environment("PENSTOCK_HAVE_UCX") == "1" ? "ucx" : "gloo", tool(), next_port(), worker());
  const auto [alpha, beta] = hosts().run(command, "sleep 0.5; " + command);
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_EQ(beta.exit_code, 0) << beta.output;
  if (environment("PENSTOCK_HAVE_UCX") == "1") {
    EXPECT_TRUE(has_text(alpha.output, "rank 0 of 4 over CPU gloo (point-to-point ucx within a host)"));
    EXPECT_TRUE(has_text(beta.output, "rank 3 of 4 over CPU gloo (point-to-point ucx within a host)"));
  }
}

TEST_F(Nodes, AFailureEndsTheRanksOfAllHosts) {
  const std::string place = fmt::format("10.77.0.1:{}", next_port());
  const std::string script = "test $RANK != 3 || { sleep 1; exit 7; }; sleep 100";
  const std::string command = launch("--nnodes 2 -n 2 --grace 1 --rdzv " + place, script);
  const auto [alpha, beta] = hosts().run(command, "sleep 0.5; " + command);
  EXPECT_EQ(alpha.exit_code, 7) << alpha.output;
  EXPECT_EQ(beta.exit_code, 7) << beta.output;
  EXPECT_TRUE(has_text(alpha.output, "rank 3 on beta failed first: exit code 7"));
  EXPECT_TRUE(has_text(beta.output, "rank 3 failed first: exit code 7"));
  EXPECT_LT(alpha.seconds, 60);
  EXPECT_LT(beta.seconds, 60);
}

TEST_F(Nodes, ARestartIsARestartOnAllHosts) {
  const std::string place = fmt::format("10.77.0.1:{}", next_port());
  const std::string script =
      "echo attempt $PENSTOCK_RESTART_COUNT; test $PENSTOCK_RESTART_COUNT = 1 -o $RANK = 0";
  const std::string command = launch("--nnodes 2 -n 1 --grace 1 --restarts 2 --rdzv " + place, script);
  const auto [alpha, beta] = hosts().run(command, "sleep 0.5; " + command);
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_EQ(beta.exit_code, 0) << beta.output;
  EXPECT_TRUE(has_text(alpha.output, "[rank 0] attempt 1"));
  EXPECT_TRUE(has_text(beta.output, "[rank 1] attempt 1"));
  EXPECT_FALSE(has_text(beta.output, "attempt 2\n"));
}

TEST_F(Nodes, AKilledLauncherIsNoticedByTheOther) {
  for (const bool hub_dies : {false, true}) {
    const std::string place = fmt::format("10.77.0.1:{}", next_port());
    const BothRanks ranks;
    const std::string quiet =
        launch("--nnodes 2 -n 1 --grace 1 --rdzv " + place, ranks.mark() + "; sleep 100");
    const std::string killed = quiet + " & run=$!; " + ranks.await_in_shell() + "; kill -9 $run; wait";
    const auto [alpha, beta] =
        hub_dies ? hosts().run(killed, "sleep 0.5; " + quiet) : hosts().run(quiet, "sleep 0.5; " + killed);
    const Ended& survivor = hub_dies ? beta : alpha;
    EXPECT_EQ(survivor.exit_code, 1) << survivor.output;
    EXPECT_TRUE(has_text(survivor.output,
                         hub_dies ? "the launcher of node 0 at 10.77.0.1" : "beta (node 1, rank 1) is lost"));
    EXPECT_LT(survivor.seconds, 60);
  }
}

TEST_F(Nodes, AStopOnOneHostStopsAll) {
  const std::string place = fmt::format("10.77.0.1:{}", next_port());
  const BothRanks ranks;
  const std::string script = "trap \"echo stopping; exit 0\" TERM; " + ranks.mark() + "; sleep 100 & wait";
  const std::string command = launch("--nnodes 2 -n 1 --rdzv " + place, script);
  const auto [alpha, beta] = hosts().run(
      command, "sleep 0.5; " + command + " & run=$!; " + ranks.await_in_shell() + "; kill $run; wait $run");
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_TRUE(has_text(alpha.output, "SIGTERM received on beta"));
  EXPECT_TRUE(has_text(alpha.output, "[rank 0] stopping"));
  EXPECT_TRUE(has_text(beta.output, "[rank 1] stopping"));
  EXPECT_LT(alpha.seconds, 60);
}

TEST_F(Nodes, ACableThatIsPulledForGoodEndsBothWithinTheDeadline) {
  const BothRanks ranks;
  const std::string place = fmt::format("10.77.0.1:{}", next_port());
  const std::string command =
      std::string("PENSTOCK_TIMEOUT_S=4 ") +
      launch("--nnodes 2 -n 1 --grace 1 --rdzv " + place, ranks.mark() + "; sleep 100");
  std::thread cut([&] {
    ranks.await();
    hosts().do_on(TwoHosts::Beta, "ip link set vb down");
  });
  const auto [alpha, beta] = hosts().run(command, "sleep 0.5; " + command);
  cut.join();
  hosts().do_on(TwoHosts::Beta, "ip link set vb up; ip -6 address add fd77::2/64 dev vb nodad");
  EXPECT_EQ(alpha.exit_code, 1) << alpha.output;
  EXPECT_EQ(beta.exit_code, 1) << beta.output;
  EXPECT_TRUE(
      has_text(alpha.output, "beta (node 1, rank 1) is lost: nothing was heard from its launcher for 4 s"));
  EXPECT_TRUE(has_text(beta.output, "the network to it is cut"));
  EXPECT_LT(alpha.seconds, 60);
  EXPECT_LT(beta.seconds, 60);
}

TEST_F(Nodes, ACableThatIsPulledForASecondIsSurvived) {
  const BothRanks ranks;
  const std::string place = fmt::format("10.77.0.1:{}", next_port());
  const std::string command = std::string("PENSTOCK_TIMEOUT_S=15 ") +
                              launch("--nnodes 2 -n 1 --rdzv " + place, ranks.mark() + "; sleep 7");
  std::thread cut([&] {
    ranks.await();
    hosts().do_on(TwoHosts::Beta, "ip link set vb down; sleep 3; ip link set vb up");
  });
  const auto [alpha, beta] = hosts().run(command, "sleep 0.5; " + command);
  cut.join();
  hosts().do_on(TwoHosts::Beta, "ip -6 address add fd77::2/64 dev vb nodad");
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_EQ(beta.exit_code, 0) << beta.output;
}

TEST_F(Nodes, ARangeStartsWithThoseThatCame) {
  const std::string options = fmt::format("--nnodes 2:4 --last-call 2 -n 1 --rdzv 10.77.0.1:{}", next_port());
  const auto [alpha, beta] =
      hosts().run(launch(options, "echo $WORLD_SIZE"), "sleep 1; " + launch(options, "echo $WORLD_SIZE"));
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_TRUE(has_text(alpha.output, "[rank 0] 2\n"));
  EXPECT_TRUE(has_text(beta.output, "[rank 1] 2\n"));
}

TEST_F(Nodes, TooFewHosts) {
  const auto options = [] {
    return fmt::format("--nnodes 2 --join-timeout 2 -n 1 --rdzv 10.77.0.1:{}", next_port());
  };
  const auto [alpha, beta] = hosts().run(launch(options(), "true"), launch(options(), "true"));
  EXPECT_NE(alpha.exit_code, 0);
  EXPECT_TRUE(has_text(alpha.output, "only 1 of at least 2 hosts joined"));
  EXPECT_LT(alpha.seconds, 30);
  EXPECT_NE(beta.exit_code, 0);
  EXPECT_LT(beta.seconds, 30);
}

TEST_F(Nodes, AnotherSecretIsRefused) {
  const std::string options =
      fmt::format("--nnodes 2 --join-timeout 15 -n 1 --rdzv 10.77.0.1:{}", next_port());
  const auto [alpha, beta] = hosts().run(
      launch(options, "true"), "sleep 1; " + launch(options, "true", "PENSTOCK_SECRET=another-secret-here "));
  EXPECT_NE(beta.exit_code, 0);
  EXPECT_TRUE(has_text(beta.output, "has another secret; set PENSTOCK_SECRET"));
  EXPECT_TRUE(has_text(alpha.output, "only 1 of at least 2 hosts joined"));
}

// The place of ssh is taken by a program that enters the other host.
TEST_F(Nodes, HostsAreStartedOverSsh) {
  const auto ssh = hosts().folder() / "fake-ssh";
  std::ofstream(ssh)
      << "#!/bin/sh\n"
      << "[ \"$1\" = -q ] || exit 99\n[ \"$2\" = beta ] || { echo \"no route to $2\" >&2; exit 255; }\n"
      << "shift 2\nexec " << hosts().on(TwoHosts::Beta) << " \"$@\"\n";
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);
  const std::string common =
      fmt::format("PENSTOCK_P2P=gloo {} launch --ssh '{} -q' -n 2 --rdzv 10.77.0.1:{} ", tool(), ssh.string(),
                  next_port());
  const Ended good =
      hosts().run_one(TwoHosts::Alpha, common + "--hosts alpha,beta -- " + worker() + " everything", 90s);
  EXPECT_EQ(good.exit_code, 0) << good.output;
  EXPECT_TRUE(has_text(good.output, "[rank 0] rank 0 of 4"));
  EXPECT_TRUE(has_text(good.output, "[rank 3] rank 3 of 4"));
  EXPECT_FALSE(has_text(good.output, "PENSTOCK_SECRET is not set"));
  const Ended bad = hosts().run_one(TwoHosts::Alpha, common + "--hosts alpha,gamma -- true", 60s);
  EXPECT_NE(bad.exit_code, 0);
  EXPECT_TRUE(has_text(bad.output, "no route to gamma"));
  EXPECT_TRUE(has_text(bad.output, "no launcher joined from gamma"));
  EXPECT_LT(bad.seconds, 20);
  const Ended failing = hosts().run_one(
      TwoHosts::Alpha,
      common + "--grace 1 --hosts alpha,beta -- /bin/sh -c 'test $RANK != 2 || exit 9; sleep 1093'", 60s);
  EXPECT_EQ(failing.exit_code, 9) << failing.output;
  EXPECT_TRUE(has_text(failing.output, "rank 2 on beta failed first: exit code 9"));
  EXPECT_LT(failing.seconds, 25);
  EXPECT_EQ(run_command("pgrep -f 'sleep 109[3]$'").output, "") << "something is left";
}

}  // namespace nodes_test
}  // namespace penstock::test
