// The faults of the campaign are real: hosts end with all of their processes, cables lose and delay packets,
// strangers reach every port, clocks jump, disks are slow.
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/chaos/cable.h"
#include "tests/chaos/host.h"
#include "tests/chaos/strangers.h"
#include "tests/chaos/strike.h"
#include "tests/command.h"
#include "tests/processes.h"
#include "tests/temporary_folder.h"

namespace penstock::test {
namespace harness_test {

using chaos::Cable;
using chaos::Clock;
using chaos::Fault;
using chaos::Host;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

class Harness : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { no_namespaces() = chaos::enter_own_mounts(); }
  static std::string& no_namespaces() {
    static std::string why;
    return why;
  }

  chaos::CommandLine shell(const std::string& script) const {
    return {.words = {"/bin/sh", "-c", script},
            .environment = {{"PATH", environment("PATH")}, {"PENSTOCK_CHAOS_TEST", mark}},
            .log = folder.path / "log",
            .folder = folder.path,
            .most_descriptors = 0};
  }
  static std::optional<int> ends(chaos::Running& command, std::chrono::seconds limit = 20s) {
    for (const auto until = Clock::now() + limit; Clock::now() < until;) {
      if (const auto code = command.exit_code()) return code;
      std::this_thread::sleep_for(2ms);
    }
    return std::nullopt;
  }

  // The processes of this test. One that was just forked shows its parent's environment until it has executed
  // its program.
  std::vector<Process> marked(std::size_t expected) const {
    const std::string entry = "PENSTOCK_CHAOS_TEST=" + mark;
    for (const auto until = Clock::now() + 20s; Clock::now() < until;) {
      if (auto found = processes_of(entry); found.size() == expected) return found;
      std::this_thread::sleep_for(2ms);
    }
    return processes_of(entry);
  }

  TemporaryFolder folder;
  const std::string mark = fmt::format("{}.{}", getpid(), fmt::ptr(this));
};

TEST_F(Harness, ACommandRunsAndItsEndIsKnown) {
  Host here(false);
  EXPECT_EQ(ends(*here.start(shell("exit 7"))), 7);
  EXPECT_EQ(ends(*here.start(shell("kill -9 $$"))), 128 + SIGKILL);
  auto running = here.start(shell("exec sleep 100"));
  const auto found = marked(1);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].pid, running->pid());
  EXPECT_FALSE(running->exit_code().has_value());
  running.reset();
  EXPECT_TRUE(processes_of("PENSTOCK_CHAOS_TEST=" + mark).empty());
}

TEST_F(Harness, EndingAHostEndsEveryProcessOfIt) {
  if (!no_namespaces().empty()) GTEST_SKIP() << no_namespaces();
  Host host(true);
  // One of them has left its group and its parent.
  auto running = host.start(shell("setsid sleep 100 & sleep 100 & exec sleep 100"));
  EXPECT_EQ(marked(3).size(), 3u);
  host.end();
  EXPECT_EQ(ends(*running), 128 + SIGKILL);
  EXPECT_TRUE(processes_of("PENSTOCK_CHAOS_TEST=" + mark).empty());
}

TEST_F(Harness, AHostHasItsOwnProcessesAndSharedMemory) {
  if (!no_namespaces().empty()) GTEST_SKIP() << no_namespaces();
  Host host(true), other(true);
  const std::string name = "penstock-" + mark;
  EXPECT_EQ(ends(*host.start(
                shell(fmt::format("ls /proc | grep -c '^[0-9]*$' >count; echo x >/dev/shm/{}", name)))),
            0);
  EXPECT_EQ(host.shared_memory(), (std::vector<std::string>{name}));
  EXPECT_TRUE(other.shared_memory().empty());
  EXPECT_FALSE(fs::exists("/dev/shm/" + name));
  int count = 0;
  std::ifstream(folder.path / "count") >> count;
  EXPECT_GE(count, 2);
  EXPECT_LE(count, 6) << "it sees processes of others";
}

// ---------------------------------------------------------------------------------------------------- cable

constexpr int kEchoPort = 9999;

sockaddr_in address_of(const std::string& host) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(kEchoPort);
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}

// Sends back what it receives.
int be_echo(const std::string& host) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const sockaddr_in own = address_of(host);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0) return 1;
  for (;;) {
    char bytes[64];
    sockaddr_in from{};
    socklen_t length = sizeof from;
    const ssize_t count = recvfrom(fd, bytes, sizeof bytes, 0, reinterpret_cast<sockaddr*>(&from), &length);
    if (count > 0 &&
        sendto(fd, bytes, static_cast<std::size_t>(count), 0, reinterpret_cast<sockaddr*>(&from), length) < 0)
      return 1;
  }
}

// How many of 50 packets, 2 ms apart, come back within `at_least` to `at_most`.
int answers(const std::string& host, std::chrono::milliseconds at_least, std::chrono::milliseconds at_most) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const sockaddr_in to = address_of(host);
  std::vector<Clock::time_point> sent;
  int count = 0;
  const auto begin = Clock::now();
  while (Clock::now() < begin + 100ms + at_most) {
    if (sent.size() < 50 && Clock::now() >= begin + sent.size() * 2ms) {
      const auto number = static_cast<char>(sent.size());
      sent.push_back(Clock::now());
      if (sendto(fd, &number, 1, 0, reinterpret_cast<const sockaddr*>(&to), sizeof to) < 0) continue;
    }
    char number = 0;
    if (recv(fd, &number, 1, 0) == 1) {
      const auto took = Clock::now() - sent.at(static_cast<std::size_t>(number));
      if (took >= at_least && took <= at_most) ++count;
      if (count == 50) break;
    }
    std::this_thread::sleep_for(200us);
  }
  return count;
}

class ChaosCable : public Harness {
 protected:
  void SetUp() override {
    if (!no_namespaces().empty()) GTEST_SKIP() << no_namespaces();
    hosts.push_back(std::make_unique<Host>(true));
    hosts.push_back(std::make_unique<Host>(true));
    cable = std::make_unique<Cable>(*hosts[0], *hosts[1], 1);
    echo = hosts[1]->helper(Host::Enter::Network, [] { return be_echo(Cable::address_of(1)); });
    for (int i = 0; i < 100 && answered(0ms, 20ms) == 0; ++i) continue;  // until the echo listens
  }
  int answered(std::chrono::milliseconds at_least, std::chrono::milliseconds at_most) {
    return hosts[0]
        ->helper(Host::Enter::Network, [=] { return answers(Cable::address_of(1), at_least, at_most); })
        ->wait();
  }

  std::vector<std::unique_ptr<Host>> hosts;
  std::unique_ptr<Cable> cable;
  std::unique_ptr<chaos::Helper> echo;
};

TEST_F(ChaosCable, CarriesEveryPacket) { EXPECT_EQ(answered(0ms, 2s), 50); }

TEST_F(ChaosCable, DelaysEachWay) {
  cable->set_quality({.delay_ms = 25});
  EXPECT_EQ(answered(50ms, 2s), 50);
  cable->set_quality({});
  EXPECT_EQ(answered(0ms, 2s), 50);
}

TEST_F(ChaosCable, LosesPackets) {
  cable->set_quality({.loss = 0.3});  // each way: half of the answers
  const int count = answered(0ms, 500ms);
  EXPECT_GT(count, 8);
  EXPECT_LT(count, 42);
}

TEST_F(ChaosCable, IsPulledAndPluggedInAgain) {
  cable->set_quality({.cut = true});
  EXPECT_EQ(answered(0ms, 300ms), 0);
  cable->set_quality({});
  EXPECT_EQ(answered(0ms, 2s), 50);
  // The interface takes a moment, either way.
  cable->set_carrier(false);
  int count = 50;
  for (int i = 0; i < 20 && count > 0; ++i) count = answered(0ms, 300ms);
  EXPECT_EQ(count, 0);
  cable->set_carrier(true);
  for (int i = 0; i < 20 && count < 50; ++i) count = answered(0ms, 500ms);
  EXPECT_EQ(count, 50);
}

// ------------------------------------------------------------------------------------------------ strangers

class Listener {
 public:
  explicit Listener(std::uint32_t address)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(address);
    socklen_t length = sizeof own;
    if (bind(fd_, reinterpret_cast<sockaddr*>(&own), sizeof own) != 0 || listen(fd_, 1000) != 0) return;
    getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &length);
    port = ntohs(own.sin_port);
  }
  ~Listener() {
    for (const int fd : accepted) close(fd);
    close(fd_);
  }
  // Accepts for that long, and keeps the connections.
  void accept_for(std::chrono::milliseconds time) {
    for (const auto until = Clock::now() + time; Clock::now() < until;) {
      const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        std::this_thread::sleep_for(1ms);
        continue;
      }
      accepted.push_back(fd);
      pollfd ready{fd, POLLIN, 0};
      char byte = 0;
      if (poll(&ready, 1, 50) == 1 && recv(fd, &byte, 1, MSG_PEEK) == 1) ++with_bytes;
    }
  }

  template <class Done>
  void accept_until(Done done) {
    for (const auto until = Clock::now() + 20s; !done() && Clock::now() < until;) accept_for(50ms);
  }

  int port = 0;
  std::vector<int> accepted;
  int with_bytes = 0;

 private:
  int fd_;
};

chaos::StrangerOptions stranger(Fault fault) {
  chaos::StrangerOptions options;
  options.fault = fault;
  options.seed = 3;
  options.seconds = 20;
  options.connections = 30;
  options.reach = "127.0.0.1";
  static std::atomic<std::int64_t> reached;
  options.reached = &reached;
  options.processes = [self = getpid()] { return std::vector<pid_t>{self}; };
  return options;
}

TEST_F(Harness, ListeningSocketsOfAProcessAreFound) {
  const Listener loopback(INADDR_LOOPBACK), any(INADDR_ANY);
  ASSERT_GT(any.port, 0);
  const auto sockets = chaos::listening_sockets({getpid()});
  ASSERT_EQ(sockets.size(), 2u);
  for (const chaos::Listening& found : sockets) {
    EXPECT_EQ(found.loopback, found.port == loopback.port);
    EXPECT_EQ(found.any_address, found.port == any.port);
    EXPECT_NE(found.loopback, found.any_address);
  }
  EXPECT_TRUE(chaos::listening_sockets({}).empty());
}

TEST_F(Harness, GarbageAndFloodsArrive) {
  for (const Fault fault : {Fault::Garbage, Fault::Flood}) {
    Listener loopback(INADDR_LOOPBACK), any(INADDR_ANY);
    const chaos::Helper other([&] { return chaos::be_stranger(stranger(fault)); });
    loopback.accept_until(
        [&] { return loopback.accepted.size() > 5 && (fault != Fault::Garbage || loopback.with_bytes > 3); });
    any.accept_until([&] { return any.accepted.size() > 5; });
    EXPECT_GT(loopback.accepted.size(), 5u);
    EXPECT_GT(any.accepted.size(), 5u);
    if (fault == Fault::Garbage) {
      EXPECT_GT(loopback.with_bytes, 3);
    }
  }
}

TEST_F(Harness, HalfOpenConnectionsStay) {
  Listener listener(INADDR_LOOPBACK);
  const chaos::Helper other([&] { return chaos::be_stranger(stranger(Fault::HalfOpen)); });
  listener.accept_until([&] { return listener.accepted.size() >= 30; });
  listener.accept_for(200ms);
  ASSERT_EQ(listener.accepted.size(), 30u);
  for (const int fd : listener.accepted) {
    pollfd closed{fd, POLLRDHUP, 0};
    EXPECT_EQ(poll(&closed, 1, 0), 0);
  }
}

// ------------------------------------------------------------------------------------------- clocks and
// disks

class Preloaded : public Harness {
 protected:
  void SetUp() override {
    if (library.empty()) GTEST_SKIP() << "built with a sanitizer, which wants to be the first library";
  }
  double seconds_of(const std::string& script) {
    Host here(false);
    chaos::CommandLine command = shell(script);
    command.environment["LD_PRELOAD"] = library;
    command.environment["RANK"] = "1";
    command.environment[chaos::kInjectedVariable] = (folder.path / "injected").string();
    const auto begin = Clock::now();
    EXPECT_EQ(ends(*here.start(command)), 0);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  const std::string library = environment("PENSTOCK_CHAOS_PRELOAD");
};

TEST_F(Preloaded, TheTimeOfDayJumpsForOneRank) {
  chaos::InjectedFile injected(folder.path / "injected");
  for (const int rank : {-1, 0, 1}) {
    for (const long jump : {86'400L, -3'600L}) {
      (*injected).rank = rank;
      (*injected).clock_jump_ns = jump * 1'000'000'000L;
      seconds_of("date +%s >now");
      long now = 0;
      std::ifstream(folder.path / "now") >> now;
      const long expected = std::time(nullptr) + (rank == 0 ? 0 : jump);
      EXPECT_NEAR(static_cast<double>(now), static_cast<double>(expected), 60) << "jump of rank " << rank;
    }
  }
}

TEST_F(Preloaded, WritesToFilesAreSlowAndOthersAreNot) {
  chaos::InjectedFile injected(folder.path / "injected");
  (*injected).write_delay_us = 50'000;
  EXPECT_GE(seconds_of("dd if=/dev/zero of=file bs=1 count=20 2>/dev/null"), 1.0);
  EXPECT_EQ(fs::file_size(folder.path / "file"), 20u);
  EXPECT_LT(seconds_of("dd if=/dev/zero bs=1 count=400 2>/dev/null | cat >/dev/null"),
            10);  // 20 s if they were
}

}  // namespace harness_test
}  // namespace penstock::test
