// Strangers on the ports of a training run, ranks with the wrong secret, and ranks that end before all have
// met.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "penstock/comm/secure/store_client.h"
#include "tests/comm/slow_relay.h"
#include "tests/comm/strangers.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/scratch_folder.h"

namespace penstock::test {
namespace security_test {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

std::string penstock() { return "'" + environment("PENSTOCK_BIN") + "/penstock'"; }
std::string worker() { return environment("PENSTOCK_DIST_WORKER"); }

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The variables of a process whose command line has these words.
std::map<std::string, std::string> variables_of(const std::string& words) {
  for (const auto& process : fs::directory_iterator("/proc")) {
    std::string command = contents(process.path() / "cmdline");
    for (char& c : command)
      if (c == '\0') c = ' ';
    if (command.find(words) == std::string::npos) continue;
    std::istringstream text(contents(process.path() / "environ"));
    std::map<std::string, std::string> variables;
    for (std::string entry; std::getline(text, entry, '\0');)
      variables[entry.substr(0, entry.find('='))] = entry.substr(entry.find('=') + 1);
    if (variables.contains("MASTER_PORT") && variables.contains("PENSTOCK_SECRET")) return variables;
  }
  return {};
}

// The port of the monitor, which only somebody who knows the secret can read.
std::optional<int> monitor_port(int port, const std::string& secret) {
  comm::SecureConnection connection(comm::Socket(stranger(port)), comm::kMaxStoreMessage);
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  if (connection.shake_hands(comm::JobKey(secret), comm::Purpose::Store, 1, deadline) !=
      comm::HandshakeEnd::Done)
    return std::nullopt;
  comm::StoreClient client(std::move(connection));
  comm::StoreRequest request;
  request.operation = comm::StoreOperation::Get;
  request.keys = {"penstock//monitor"};
  const auto reply = client.ask(request, deadline);
  if (!reply || !reply->found) return std::nullopt;
  return std::stoi(reply->value);
}

class Security : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int file = 0; file < 12; ++file) {
      std::string text;
      for (int line = 0; line < 30; ++line)
        text += fmt::format("int value_{} = {};\n", file * line % 7, file + line);
      folder.write(fmt::format("text/{}.h", file), text);
    }
  }

  std::string train(const std::string& name, int steps, int timeout_s = 20) const {
    return fmt::format(
        "{} train --data '{}' --run_folder '{}' --dp 2 --pp 1 --preset tiny --width 32 --layers 2 --heads 2 "
        "--key_value_heads 2 --feed_width 64 --context 32 --microbatches 2 --microbatch_size 2 --steps {} "
        "--warmup_steps 2 --validate_every 0 --validation_fraction 0.2 --checkpoint.every 50 --sample_tokens "
        "0 "
        "--trace_steps 0 --progress lines --device cpu --timeout_s {}",
        penstock(), (folder / "text").string(), (folder / name).string(), steps, timeout_s);
  }

  // The losses by step, as text: the same digits are the same bits.
  std::map<int, std::string> losses(const std::string& name) const {
    std::map<int, std::string> result;
    std::ifstream file(folder / name / "metrics.jsonl");
    for (std::string line; std::getline(file, line);)
      if (const auto entry = nlohmann::json::parse(line); entry.at("type") == "step")
        result[entry.at("step")] = entry.at("loss").dump();
    return result;
  }

  bool has_done(const std::string& name, int step) const {
    for (int i = 0; i < 600; ++i) {
      if (contents(folder / name / "metrics.jsonl").find(fmt::format("\"step\":{},", step)) !=
          std::string::npos)
        return true;
      std::this_thread::sleep_for(100ms);
    }
    return false;
  }

  ScratchFolder folder;
};

TEST_F(Security, ARunAmongStrangersEndsWithTheBitsOfAnUndisturbedOne) {
  constexpr int kSteps = 800;
  raise_descriptor_limit();
  const Ended alone = run_command(train("alone", kSteps), 150s);
  ASSERT_EQ(alone.exit_code, 0) << alone.output;
  auto disturbed = std::async(
      std::launch::async, [&] { return run_command("ulimit -n 1024; " + train("disturbed", kSteps), 250s); });
  ASSERT_TRUE(has_done("disturbed", 1));
  const auto variables = variables_of("train --worker " + (folder / "disturbed").string());
  ASSERT_FALSE(variables.empty()) << "the run has ended too early for this test";
  const int port = std::stoi(variables.at("MASTER_PORT"));
  const auto monitor = monitor_port(port, variables.at("PENSTOCK_SECRET"));
  ASSERT_TRUE(monitor) << "the launcher's secret opens the store";
  EXPECT_FALSE(monitor_port(port, "a guess of sixteen characters or more"));
  std::vector<int> idle;
  {
    for (const int target : {port, *monitor})
      for (int i = 0; i < 1100; ++i)
        if (const int fd = stranger(target); fd >= 0) idle.push_back(fd);
    EXPECT_GT(idle.size(), 1100u);
    const Strangers strangers({port, *monitor}, 300);
    while (disturbed.wait_for(100ms) != std::future_status::ready) {
    }
    EXPECT_GT(strangers.connections(), 100);
  }
  for (const int fd : idle) close(fd);
  const Ended ended = disturbed.get();
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const auto expected = losses("alone");
  EXPECT_EQ(expected.size(), static_cast<std::size_t>(kSteps));
  EXPECT_EQ(losses("disturbed"), expected);
  EXPECT_FALSE(has_text(ended.output, "was lost")) << ended.output;
}

// Rank 1's last requests are under way when rank 0 has nothing left to do: rank 0 leaves last, so that a run
// that is over ends well on every rank.
TEST_F(Security, ADistantRankEndsWell) {
  const int port = port_for_later();
  const SlowRelay relay(port, 20ms);
  const auto rank = [&](int number, int master) {
    return fmt::format(
        "RANK={0} WORLD_SIZE=2 LOCAL_RANK={0} LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
        "MASTER_PORT={1} PENSTOCK_SECRET=the-secret-of-this-job {2}",
        number, master, train("distant", 6));
  };
  const Ended ended =
      run_command(fmt::format("{} & first=$!; {}; echo rank 1 ended with $?; wait $first; echo "
                              "rank 0 ended with $?",
                              rank(0, port), rank(1, relay.port())),
                  120s);
  EXPECT_TRUE(has_text(ended.output, "rank 0 ended with 0"));
  EXPECT_TRUE(has_text(ended.output, "rank 1 ended with 0"));
  EXPECT_GE(relay.connections(), 1);
  EXPECT_EQ(losses("distant").size(), 6u);
  EXPECT_TRUE(fs::exists(folder / "distant/checkpoints/step-00000006"));
}

TEST_F(Security, EachLaunchHasItsOwnSecretUnlessTheUserSetsOne) {
  const auto secret_of = [](const std::string& before) {
    return run_command(before + penstock() + " launch -n 1 --no-prefix -- printenv PENSTOCK_SECRET").output;
  };
  const std::string one = secret_of(""), other = secret_of("");
  EXPECT_EQ(one.size(), 65u) << one;
  EXPECT_NE(one, other);
  EXPECT_EQ(secret_of("PENSTOCK_SECRET=chosen-by-the-user "), "chosen-by-the-user\n");
  const Ended refused = run_command("PENSTOCK_SECRET=short " + penstock() + " launch -n 1 -- true");
  EXPECT_EQ(refused.exit_code, 2) << refused.output;
  EXPECT_TRUE(has_text(refused.output, "PENSTOCK_SECRET")) << refused.output;
  EXPECT_FALSE(has_text(refused.output, "\"short\"")) << "a secret is not shown";
}

TEST_F(Security, ARankWithAnotherSecretIsToldSo) {
  const int port = port_for_later();
  const auto rank = [&](int number, const std::string& secret) {
    return fmt::format(
        "RANK={} WORLD_SIZE=2 MASTER_PORT={} PENSTOCK_SECRET={} PENSTOCK_TIMEOUT_S=15 '{}' connects", number,
        port, secret, worker());
  };
  const Ended ended =
      run_command(fmt::format("{} & {}; echo code $?; wait $!", rank(0, "the-secret-of-this-job"),
                              rank(1, "the-secret-of-another-job")),
                  90s);
  EXPECT_LT(ended.seconds, 60) << ended.output;
  EXPECT_TRUE(has_text(ended.output, "the store there belongs to a job with another secret"));
  EXPECT_TRUE(has_text(ended.output, "did not know its secret")) << "rank 0 says why rank 1 is missing";
  EXPECT_TRUE(has_text(ended.output, "rank 1 of 2 did not join in time"));
  EXPECT_FALSE(has_text(ended.output, "the-secret-of")) << "no secret is shown";
}

// The deadline is far away: the launcher tells the others at once, whoever it is.
TEST_F(Security, ARankThatEndsBeforeAllHaveMetIsNamedSoon) {
  for (const int victim : {2, 0}) {
    const Ended ended = run_command(
        fmt::format("PENSTOCK_TIMEOUT_S=100 PENSTOCK_TEST_VICTIM={} {} launch -n 4 --grace 60 -- '{}' "
                    "killed_in_rendezvous",
                    victim, penstock(), worker()),
        90s);
    EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.output;
    EXPECT_LT(ended.seconds, 30) << ended.output;
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      bool named = false;
      std::istringstream lines(ended.output);
      for (std::string line; std::getline(lines, line);)
        named = named || (line.find(fmt::format("[rank {}]", rank)) != std::string::npos &&
                          line.find(fmt::format("rank {} was lost: ", victim)) != std::string::npos);
      EXPECT_TRUE(named) << "rank " << rank << "\n" << ended.output;
    }
  }
}

TEST_F(Security, SigtermEndsARankThatStillConnects) {
  const int port = port_for_later();
  const Ended ended = run_command(
      fmt::format("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} {} & "
                  "run=$!; sleep 4; kill -TERM $run; wait $run",
                  port, train("lonely", 4, 100)),
      60s);
  EXPECT_EQ(ended.exit_code, 128 + SIGTERM) << ended.output;
  EXPECT_LT(ended.seconds, 30);
}

}  // namespace security_test
}  // namespace penstock::test
