// The server that only ranks of a job may use, and what strangers can and cannot do to it.
#include "penstock/comm/secure/server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cctype>
#include <chrono>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "penstock/comm/secure/connection.h"
#include "penstock/comm/secure/store_client.h"
#include "penstock/comm/secure/store_server.h"
#include "tests/comm/forked_ranks.h"
#include "tests/comm/strangers.h"

namespace penstock::comm {
namespace secure_server_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::hear;
using test::listen_on_loopback;
using test::say;
using test::stranger;
using test::Strangers;

const JobKey& job_key() {
  static const JobKey key("the secret of this job");
  return key;
}

// Sends every payload back in upper case.
class Echo {
 public:
  explicit Echo(ServerLimits limits = {}) {
    const auto [fd, port] = listen_on_loopback();
    port_ = port;
    SecureServer::Events events;
    events.joined = [this](SecureServer::Id, int rank) { joined = joined + 1, last_rank = rank; };
    events.received = [this](SecureServer::Id peer, std::string_view payload) {
      if (payload == "nonsense") throw MismatchError("a payload that makes no sense");
      std::string answer(payload);
      for (char& c : answer) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      server_->send(peer, answer);
    };
    events.closed = [this](SecureServer::Id, int, const std::string&) { closed = closed + 1; };
    events.tick = [this] {
      if (tick_throws) throw StateError("no memory for a tick");
    };
    events.failed = [this](const std::string& why) { failed = failed + (why == "no memory for a tick"); };
    server_ =
        std::make_unique<SecureServer>(Socket(fd), Purpose::Store, job_key(), limits, std::move(events));
    server_->start();
  }
  int port() const { return port_; }
  SecureServer& server() { return *server_; }

  std::atomic<int> joined{0}, closed{0}, failed{0}, last_rank{-1};
  std::atomic<bool> tick_throws{false};

 private:
  int port_ = 0;
  std::unique_ptr<SecureServer> server_;
};

std::optional<SecureConnection> rank_of_the_job(int port, int rank = 1, const JobKey& key = job_key(),
                                                Purpose purpose = Purpose::Store, HandshakeEnd* end = nullptr,
                                                std::size_t max_payload = std::size_t{1} << 20) {
  SecureConnection connection(Socket(stranger(port)), max_payload);
  const auto ended = connection.shake_hands(key, purpose, rank, Clock::now() + 10s);
  if (end != nullptr) *end = ended;
  if (ended != HandshakeEnd::Done) return std::nullopt;
  return connection;
}

// A rank that is dropped in favour of a stranger tries again, as ranks do.
std::optional<SecureConnection> patient_rank(int port, int rank = 1) {
  for (const auto deadline = Clock::now() + 60s; Clock::now() < deadline;) {
    if (auto connection = rank_of_the_job(port, rank)) return connection;
    std::this_thread::sleep_for(5ms);
  }
  return std::nullopt;
}

void expect_echo(SecureConnection& connection, const std::string& text, const std::string& expected) {
  ASSERT_TRUE(connection.send(text, Clock::now() + 20s));
  EXPECT_EQ(connection.receive(Clock::now() + 20s), expected);
}

template <class Condition>
bool soon(Condition condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

TEST(SecureServer, RanksOfTheJobTalk) {
  Echo echo;
  auto one = rank_of_the_job(echo.port(), 1), two = rank_of_the_job(echo.port(), 2);
  ASSERT_TRUE(one && two);
  expect_echo(*one, "hello", "HELLO");
  expect_echo(*two, std::string(1 << 20, 'x'), std::string(1 << 20, 'X'));
  expect_echo(*one, "", "");
  EXPECT_EQ(echo.joined, 2);
  EXPECT_FALSE(echo.server().await_alone(Clock::now() + 50ms)) << "two ranks are here";
  one.reset();
  two.reset();
  EXPECT_TRUE(echo.server().await_alone(Clock::now() + 20s));
  EXPECT_EQ(echo.closed, 2);
}

TEST(SecureServer, NobodyElseJoins) {
  Echo echo;
  HandshakeEnd end{};
  EXPECT_FALSE(rank_of_the_job(echo.port(), 1, JobKey("another secret here"), Purpose::Store, &end));
  EXPECT_EQ(end, HandshakeEnd::Refused);
  EXPECT_FALSE(rank_of_the_job(echo.port(), 1, job_key(), Purpose::Monitor, &end));
  EXPECT_EQ(end, HandshakeEnd::Closed);
  EXPECT_EQ(echo.joined, 0);
  EXPECT_TRUE(rank_of_the_job(echo.port()));
}

TEST(SecureServer, ARankOutsideTheJobDoesNotJoin) {
  ServerLimits limits;
  limits.ranks = 4;
  Echo echo(limits);
  EXPECT_TRUE(rank_of_the_job(echo.port(), 3));
  EXPECT_FALSE(rank_of_the_job(echo.port(), 4));
}

TEST(SecureServer, StrangersHearNothingButAChallenge) {
  Echo echo;
  for (const std::string& words :
       {std::string(1, '\0'), std::string(500, 'g'), std::string("GET / HTTP/1.1\r\n\r\n")}) {
    const int fd = stranger(echo.port());
    say(fd, words);
    bool closed = false;
    EXPECT_EQ(hear(fd, words.size() > kHelloBytes ? 5000 : 100, &closed), "");
    EXPECT_EQ(closed, words.size() > kHelloBytes) << "an unfinished hello may still be finished";
    close(fd);
  }
  const int fd = stranger(echo.port());
  say(fd, ClientHandshake(job_key(), Purpose::Store, 1, std::string(kNonceBytes, 'n')).hello());
  EXPECT_EQ(hear(fd, 1000).size(), kChallengeBytes);
  say(fd, std::string(kProofBytes, 'p'));
  bool closed = false;
  EXPECT_EQ(hear(fd, 5000, &closed), "") << "no proof of its own, no reason";
  EXPECT_TRUE(closed);
  close(fd);
}

TEST(SecureServer, AnUnfinishedHandshakeEnds) {
  ServerLimits limits;
  limits.handshake = 200ms;
  Echo echo(limits);
  const int idle = stranger(echo.port()), slow = stranger(echo.port());
  bool idle_closed = false, slow_closed = false;
  for (int i = 0; i < 500 && !slow_closed; ++i) {  // one byte at a time does not extend it
    say(slow, "P");
    hear(slow, 20, &slow_closed);
  }
  hear(idle, 10'000, &idle_closed);
  EXPECT_TRUE(idle_closed);
  EXPECT_TRUE(slow_closed);
  close(idle);
  close(slow);
}

TEST(SecureServer, AJoinedPeerThatBreaksTheRulesIsClosed) {
  Echo echo;
  auto peer = rank_of_the_job(echo.port());
  ASSERT_TRUE(peer);
  ASSERT_TRUE(peer->send("nonsense", Clock::now() + 10s));
  EXPECT_THROW(peer->receive(Clock::now() + 10s), ConnectionLost);
  EXPECT_TRUE(soon([&] { return echo.closed == 1; }));
  // Bytes that somebody injects into an open connection.
  auto victim = rank_of_the_job(echo.port());
  ASSERT_TRUE(victim);
  say(victim->fd(), std::string(200, '\0'));
  EXPECT_THROW(victim->receive(Clock::now() + 10s), ConnectionLost);
  EXPECT_TRUE(soon([&] { return echo.closed == 2; }));
}

TEST(SecureServer, ABigAnnouncementTakesNoMemory) {
  Echo echo;
  auto peer = rank_of_the_job(echo.port());
  ASSERT_TRUE(peer);
  const std::size_t before = resident_bytes();
  for (int i = 0; i < 20; ++i) {
    const int fd = stranger(echo.port());
    say(fd, std::string("\x60\x00\x00\x00\x00\x00\x00\x60", 8) + std::string(3000, 'x'));
    hear(fd, 1000);
    close(fd);
  }
  say(peer->fd(), std::string("\x60\x00\x00\x00", 4) + std::string(32, 't'));
  EXPECT_THROW(peer->receive(Clock::now() + 10s), ConnectionLost);
  EXPECT_LT(resident_bytes(), before + (std::size_t{64} << 20));
}

TEST(SecureServer, APeerThatDoesNotReadIsGivenUp) {
  ServerLimits limits;
  limits.max_unsent = 1 << 20;
  Echo echo(limits);
  auto peer = rank_of_the_job(echo.port());
  ASSERT_TRUE(peer);
  for (int i = 0; i < 200 && echo.closed == 0; ++i) {
    try {
      static_cast<void>(peer->send(std::string(1 << 18, 'x'), Clock::now() + 100ms));
    } catch (const ConnectionLost&) {
      break;
    }
  }
  EXPECT_TRUE(soon([&] { return echo.closed == 1; }));
  auto other = rank_of_the_job(echo.port());
  ASSERT_TRUE(other);
  expect_echo(*other, "still here", "STILL HERE");
}

TEST(SecureServer, AFloodDelaysNobodyWhoHasJoined) {
  Echo echo;
  auto peer = rank_of_the_job(echo.port());
  ASSERT_TRUE(peer);
  const Strangers strangers({echo.port(), echo.port()});
  ASSERT_TRUE(soon([&] { return strangers.connections() > 200; }));
  for (int i = 0; i < 200; ++i) expect_echo(*peer, "word", "WORD");
  auto late = patient_rank(echo.port(), 2);
  ASSERT_TRUE(late) << "a rank that joins during a flood";
  expect_echo(*late, "late", "LATE");
  EXPECT_EQ(echo.closed, 0);
}

// 1,100 connections that say nothing, to a process that may open 100 files: in a process of its own, because
// of the limit.
TEST(SecureServer, RunsOutOfDescriptorsAndStaysAlive) {
  const auto ended = test::run_ranks(2, 120s, [](int rank, const test::FileStore& store) {
    if (rank == 0) {
      const rlimit few{100, 100};
      RANK_CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
      ServerLimits limits;
      limits.half_open = 4096;
      limits.handshake = 60s;
      Echo echo(limits);
      std::vector<int> hoard;  // the process itself has taken nearly all
      for (int fd; hoard.size() < 80 && (fd = dup(0)) >= 0;) hoard.push_back(fd);
      store.set("port", std::to_string(echo.port()));
      store.get("done", 100s);
      RANK_CHECK(echo.closed == 0);
      store.set("checked", "");
    } else {
      test::raise_descriptor_limit();
      const int port = std::stoi(store.get("port"));
      auto early = patient_rank(port, 1);
      RANK_CHECK(early.has_value());
      std::vector<int> idle;
      for (int i = 0; i < 1100; ++i)
        if (const int fd = stranger(port); fd >= 0) idle.push_back(fd);
      RANK_CHECK(idle.size() >= 500);
      for (int i = 0; i < 20; ++i) {
        RANK_CHECK(early->send("early", Clock::now() + 20s));
        RANK_CHECK(early->receive(Clock::now() + 20s) == "EARLY");
      }
      auto late = patient_rank(port, 2);
      RANK_CHECK(late.has_value());
      RANK_CHECK(late->send("late", Clock::now() + 20s));
      RANK_CHECK(late->receive(Clock::now() + 20s) == "LATE");
      for (const int fd : idle) close(fd);
      store.set("done", "");
      store.get("checked");  // both connections stay until then
    }
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
}

TEST(SecureServer, EndsWhileStrangersWait) {
  for (int i = 0; i < 20; ++i) {
    auto echo = std::make_unique<Echo>();
    const int fd = stranger(echo->port());
    auto peer = rank_of_the_job(echo->port());
    ASSERT_TRUE(peer);
    std::atomic<bool> ran{false};
    echo->server().post([&] { ran = true; });
    echo.reset();
    EXPECT_TRUE(ran) << "what was posted before the end is done";
    EXPECT_THROW(peer->receive(Clock::now() + 10s), ConnectionLost);
    close(fd);
  }
}

TEST(SecureServer, SurvivesATaskThatThrows) {
  Echo echo;
  auto peer = rank_of_the_job(echo.port());
  ASSERT_TRUE(peer);
  echo.server().post([] { throw StateError("a task"); });
  expect_echo(*peer, "still here", "STILL HERE");
  EXPECT_EQ(echo.failed, 0);
}

TEST(SecureServer, SaysThatItHasFailed) {
  Echo echo;
  auto peer = rank_of_the_job(echo.port());
  ASSERT_TRUE(peer);
  echo.tick_throws = true;
  EXPECT_THROW(peer->receive(Clock::now() + 20s), ConnectionLost);
  EXPECT_TRUE(soon([&] { return echo.failed == 1; }));
  echo.server().post([] {});  // dropped
  EXPECT_TRUE(echo.server().await_alone(Clock::now() + 20s)) << "nobody waits for what cannot come";
  EXPECT_FALSE(rank_of_the_job(echo.port()));
}

TEST(SecureServer, MayBeStoppedByTwoThreadsAtOnce) {
  for (int i = 0; i < 50; ++i) {
    Echo echo;
    std::thread one([&] { echo.server().stop(); }), two([&] { echo.server().stop(); });
    one.join();
    two.join();
  }
}

TEST(SecureServer, MayBeDestroyedOnItsOwnThread) {
  auto echo = std::make_unique<Echo>();
  auto peer = rank_of_the_job(echo->port());
  ASSERT_TRUE(peer);
  std::atomic<bool> gone{false}, late{false};
  SecureServer& server = echo->server();
  server.post([&] {
    server.post([&] { late = true; });
    echo.reset();
    gone = true;
  });
  EXPECT_TRUE(soon([&] { return gone.load(); }));
  EXPECT_THROW(peer->receive(Clock::now() + 20s), ConnectionLost);
  EXPECT_FALSE(late) << "nothing is called that may use what is gone";
}

// ------------------------------------------------------------------------------------- the store on top of
// it

StoreRequest request_of(StoreOperation operation, std::vector<std::string> keys,
                        const std::string& value = "") {
  StoreRequest request;
  request.operation = operation;
  request.keys = std::move(keys);
  request.value = value;
  return request;
}

TEST(StoreTable, RefusesWhatIsTooLarge) {
  StoreTable table;
  EXPECT_EQ(table.apply(request_of(StoreOperation::Set, {"k"}, "v")).refused, "");
  EXPECT_NE(table.apply(request_of(StoreOperation::Set, {std::string(kMaxStoreKey + 1, 'k')}, "v")).refused,
            "");
  EXPECT_NE(table.apply(request_of(StoreOperation::Set, {"k"}, std::string(kMaxStoreValue + 1, 'v'))).refused,
            "");
  EXPECT_NE(table.apply(request_of(StoreOperation::Count, {}, std::string(kMaxStoreValue + 1, 'v'))).refused,
            "");
  EXPECT_NE(table.apply(request_of(StoreOperation::Set, {})).refused, "");
  EXPECT_NE(table.apply(request_of(StoreOperation::Get, {"a", "b"})).refused, "");
  EXPECT_EQ(table.apply(request_of(StoreOperation::Count, {})).amount, 1)
      << "refused requests change nothing";
  StoreRequest add = request_of(StoreOperation::Add, {"k"});
  add.amount = 1;
  EXPECT_NE(table.apply(add).refused, "") << "v is no number";
  add.keys = {"n"};
  add.amount = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(table.apply(add).amount, add.amount);
  EXPECT_NE(table.apply(add).refused, "") << "an overflow";
}

TEST(StoreClient, LateRepliesAreNotMistakenForOthers) {
  // A server that answers the first request only when the second has come.
  const auto [fd, port] = listen_on_loopback();
  std::unique_ptr<SecureServer> server;
  std::string held;
  SecureServer::Events events;
  events.received = [&](SecureServer::Id peer, std::string_view payload) {
    StoreReply reply;
    reply.number = StoreRequest::from_bytes(payload).number;
    reply.value = "reply to " + StoreRequest::from_bytes(payload).keys.front();
    if (held.empty()) {
      held = reply.to_bytes();
      return;
    }
    server->send(peer, held);
    server->send(peer, reply.to_bytes());
  };
  ServerLimits limits;
  limits.max_payload = kMaxStoreMessage;
  server = std::make_unique<SecureServer>(Socket(fd), Purpose::Store, job_key(), limits, std::move(events));
  server->start();
  auto connection = rank_of_the_job(port, 1, job_key(), Purpose::Store, nullptr, kMaxStoreMessage);
  ASSERT_TRUE(connection);
  StoreClient client(std::move(*connection));
  EXPECT_FALSE(client.ask(request_of(StoreOperation::Get, {"a"}), Clock::now() + 100ms));
  const auto reply = client.ask(request_of(StoreOperation::Get, {"b"}), Clock::now() + 20s);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->value, "reply to b");
  server.reset();
  EXPECT_THROW(client.ask(request_of(StoreOperation::Get, {"c"}), Clock::now() + 20s), ConnectionLost);
  EXPECT_THROW(client.ask(request_of(StoreOperation::Get, {"d"}), Clock::now() + 20s), ConnectionLost);
}

TEST(StoreClient, AThreadWaitsForAnotherOneNoLongerThanItsDeadline) {
  const auto [fd, port] = listen_on_loopback();
  SecureServer::Events events;
  events.received = [](SecureServer::Id, std::string_view) {};  // no answer
  ServerLimits limits;
  limits.max_payload = kMaxStoreMessage;
  SecureServer server(Socket(fd), Purpose::Store, job_key(), limits, std::move(events));
  server.start();
  auto connection = rank_of_the_job(port, 1, job_key(), Purpose::Store, nullptr, kMaxStoreMessage);
  ASSERT_TRUE(connection);
  StoreClient client(std::move(*connection));
  std::thread other(
      [&] { EXPECT_FALSE(client.ask(request_of(StoreOperation::Get, {"a"}), Clock::now() + 3s)); });
  std::this_thread::sleep_for(200ms);
  const auto begin = Clock::now();
  EXPECT_FALSE(client.ask(request_of(StoreOperation::Get, {"b"}), begin + 100ms));
  EXPECT_LT(Clock::now() - begin, 2s);
  other.join();
}

}  // namespace secure_server_test
}  // namespace penstock::comm
