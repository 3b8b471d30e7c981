// Ranks on two hosts, with nothing set but what every user sets: the rank, the number of ranks and the
// master.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/command.h"
#include "tests/dist/two_hosts.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"

namespace penstock::test {
namespace hosts_test {

using namespace std::chrono_literals;

std::string worker() { return "'" + environment("PENSTOCK_DIST_WORKER") + "'"; }
std::string penstock() { return "'" + environment("PENSTOCK_BIN") + "/penstock'"; }

const TwoHosts& hosts() {
  static const TwoHosts kHosts;
  return kHosts;
}

// The variables of one rank; a port for each call of `next_port`.
std::string rank(int number, const std::string& master, int port, int size = 2) {
  return fmt::format("RANK={} WORLD_SIZE={} MASTER_ADDR={} MASTER_PORT={} ", number, size, master, port);
}
int next_port() {
  static int port = 21000 + getpid() % 5000;
  return ++port;
}

class Hosts : public ::testing::Test {
 protected:
  void SetUp() override { PENSTOCK_NEEDS_TWO_HOSTS(hosts()); }
};

void expect_everything_works(const std::string& master, const std::string& more = "") {
  const int port = next_port();
  const auto [alpha, beta] = hosts().run(more + " " + rank(0, master, port) + worker() + " everything",
                                         more + " " + rank(1, master, port) + worker() + " everything");
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_EQ(beta.exit_code, 0) << beta.output;
  EXPECT_TRUE(has_text(beta.output, "rank 1 of 2"));
}

TEST_F(Hosts, MasterByAddress) { expect_everything_works("10.77.0.1"); }
TEST_F(Hosts, MasterByIpv6Address) { expect_everything_works("fd77::1"); }
// On alpha the name means 127.0.1.1.
TEST_F(Hosts, MasterByItsName) { expect_everything_works("alpha"); }

TEST_F(Hosts, AChosenInterfaceStillWins) {
  const int port = next_port();
  const auto [alpha, beta] =
      hosts().run("GLOO_SOCKET_IFNAME=va " + rank(0, "10.77.0.1", port) + worker() + " everything",
                  "GLOO_SOCKET_IFNAME=vb " + rank(1, "10.77.0.1", port) + worker() + " everything");
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_EQ(beta.exit_code, 0) << beta.output;
}

TEST_F(Hosts, AWrongInterfaceIsNamedOnBothSides) {
  const int port = next_port();
  const auto [alpha, beta] =
      hosts().run("PENSTOCK_TIMEOUT_S=60 " + rank(0, "10.77.0.1", port) + worker() + " everything",
                  "PENSTOCK_TIMEOUT_S=60 GLOO_SOCKET_IFNAME=eth9 " + rank(1, "10.77.0.1", port) + worker() +
                      " everything");
  EXPECT_NE(beta.exit_code, 0);
  EXPECT_TRUE(has_text(beta.output, "\"eth9\" does not exist on this host; choose one of vb (10.77.0.2)"));
  EXPECT_NE(alpha.exit_code, 0);
  EXPECT_TRUE(has_text(alpha.output, "rank 1"));
  EXPECT_TRUE(has_text(alpha.output, "eth9"));
  EXPECT_LT(alpha.seconds, 45) << "it must not wait for the deadline";
}

// Loopback of one side is not that of the other: the check names both, before Gloo tries.
TEST_F(Hosts, AnInterfaceThatTheOthersDoNotReach) {
  const int port = next_port();
  const std::string limit = "PENSTOCK_TIMEOUT_S=60 ";
  const auto [alpha, beta] =
      hosts().run(limit + "GLOO_SOCKET_IFNAME=lo " + rank(0, "10.77.0.1", port) + worker() + " everything",
                  limit + rank(1, "10.77.0.1", port) + worker() + " everything");
  for (const Ended& ended : {alpha, beta}) {
    EXPECT_NE(ended.exit_code, 0);
    EXPECT_TRUE(
        has_text(ended.output, "rank 1 on beta (10.77.0.2) cannot reach rank 0 on alpha (127.0.0.1)"));
    EXPECT_TRUE(has_text(ended.output, "refused"));
    EXPECT_LT(ended.seconds, 45);
  }
}

// Two containers on one machine have no memory in common: each is a host of its own.
TEST_F(Hosts, OneMachineWithTwoSharedMemories) {
  if (environment("PENSTOCK_HAVE_UCX") != "1") GTEST_SKIP() << "this build has no UCX";
  const int port = next_port();
  const auto in_container = [](const std::string& command) {
    return "unshare --mount --propagation private sh -c \"mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "
           "env " +
           command + "\"";
  };
  const std::string common = "PENSTOCK_P2P=ucx ";
  const auto lines = [&](const std::string& wrapped_1) {
    const auto first = common + rank(0, "127.0.0.1", port, 3) + worker() + " everything";
    const auto second = common + rank(1, "127.0.0.1", port, 3) + worker() + " everything";
    const auto third = common + rank(2, "127.0.0.1", port, 3) + worker() + " everything";
    return fmt::format("({}) & ({}) & ({}) & wait", first, second, wrapped_1.empty() ? third : wrapped_1);
  };
  const Ended apart = hosts().run_one(
      TwoHosts::Alpha, lines(in_container(common + rank(2, "127.0.0.1", port, 3) + worker() + " everything")),
      90s);
  EXPECT_TRUE(has_text(apart.output, "rank 0 of 3 over CPU gloo (point-to-point ucx within a host)"));
  EXPECT_TRUE(has_text(apart.output, "rank 1 of 3 over CPU gloo (point-to-point ucx within a host)"));
  EXPECT_TRUE(has_text(apart.output, "rank 2 of 3 over CPU gloo (point-to-point ucx within a host)"));
  const Ended together = hosts().run_one(TwoHosts::Alpha, lines(""), 90s);
  EXPECT_TRUE(has_text(together.output, "rank 2 of 3 over CPU gloo (point-to-point ucx),"));
}

// ------------------------------------------------------------------------------------------- what does not
// work

TEST_F(Hosts, NobodyListensAtTheMaster) {
  const Ended refused = hosts().run_one(
      TwoHosts::Beta, "PENSTOCK_TIMEOUT_S=3 " + rank(1, "10.77.0.1", next_port()) + worker() + " everything",
      60s);
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_TRUE(has_text(refused.output, "MASTER_ADDR"));
  EXPECT_LT(refused.seconds, 40);
}

// Packets to the master vanish: each side ends at its deadline and says what is missing.
TEST_F(Hosts, TheMasterIsABlackHole) {
  const int port = next_port();
  hosts().do_on(TwoHosts::Beta,
                "ip route add blackhole 10.77.9.0/24; ip neigh replace 10.77.0.9 lladdr "
                "02:00:00:00:00:09 dev vb");
  for (const char* master : {"10.77.0.9", "10.77.9.1"}) {
    const auto [alpha, beta] =
        hosts().run("PENSTOCK_TIMEOUT_S=4 " + rank(0, "10.77.0.1", port) + worker() + " everything",
                    "PENSTOCK_TIMEOUT_S=4 " + rank(1, master, port) + worker() + " everything");
    EXPECT_NE(alpha.exit_code, 0);
    EXPECT_TRUE(has_text(alpha.output, "rank 1 of 2 did not join in time"));
    EXPECT_LT(alpha.seconds, 40);
    EXPECT_NE(beta.exit_code, 0);
    EXPECT_TRUE(has_text(beta.output, "MASTER_ADDR"));
    EXPECT_TRUE(has_text(beta.output, master));
    EXPECT_LT(beta.seconds, 40);
  }
}

// ---------------------------------------------------------------------------------------------------
// training

std::string training_flags(const std::filesystem::path& folder, const std::string& name) {
  return fmt::format(
      "--data '{}' --run_folder '{}' --preset tiny --width 32 --layers 2 --heads 2 --key_value_heads 2 "
      "--feed_width 64 "
      "--context 32 --microbatches 2 --microbatch_size 2 --steps 6 --warmup_steps 2 --validate_every 6 "
      "--validate_batches 1 --validation_fraction 0.2 --checkpoint.every 3 --sample_tokens 0 --progress "
      "lines --device "
      "cpu --dp 2 --pp 1",
      (folder / "text").string(), (folder / name).string());
}

std::vector<double> losses(const std::filesystem::path& folder, const std::string& name) {
  std::vector<double> result;
  std::ifstream file(folder / name / "metrics.jsonl");
  for (std::string line; std::getline(file, line);)
    if (const auto entry = nlohmann::json::parse(line); entry.at("type") == "step")
      result.push_back(entry.at("loss"));
  return result;
}

TEST_F(Hosts, TrainingGivesTheLossesOfOneHost) {
  // Not in shared memory, which is another one on each host.
  const TemporaryFolder temporary;
  const std::filesystem::path& folder = temporary.path;
  std::filesystem::create_directory(folder / "text");
  for (int file = 0; file < 8; ++file) {
    std::string text;
    for (int line = 0; line < 30; ++line)
      text += fmt::format("int value_{} = {};\n", file * line % 7, file + line);
    std::ofstream(folder / fmt::format("text/{}.h", file)) << text;
  }
  const Ended one = run_command(fmt::format("{} train {}", penstock(), training_flags(folder, "one")), 120s);
  ASSERT_EQ(one.exit_code, 0) << one.output;
  const int port = next_port();
  const std::string train = fmt::format("{} train {}", penstock(), training_flags(folder, "two"));
  const auto [alpha, beta] =
      hosts().run(rank(0, "10.77.0.1", port) + train, rank(1, "10.77.0.1", port) + train, 120s);
  EXPECT_EQ(alpha.exit_code, 0) << alpha.output;
  EXPECT_EQ(beta.exit_code, 0) << beta.output;
  ASSERT_EQ(losses(folder, "one").size(), 6u);
  EXPECT_EQ(losses(folder, "two"), losses(folder, "one")) << "every bit";
  // The same through the launchers of both hosts, which divide the ranks among themselves.
  const std::string launched =
      fmt::format("PENSTOCK_SECRET=0123456789abcdef {} train {} --nnodes 2 --rdzv alpha:{}", penstock(),
                  training_flags(folder, "launched"), next_port());
  const auto [first, second] = hosts().run(launched, launched, 120s);
  EXPECT_EQ(first.exit_code, 0) << first.output;
  EXPECT_EQ(second.exit_code, 0) << second.output;
  EXPECT_EQ(losses(folder, "launched"), losses(folder, "one"));
}

}  // namespace hosts_test
}  // namespace penstock::test
