// What the launchers of several hosts tell each other, and what the hub decides: without sockets and clocks,
// but for one test.
#include "penstock/comm/launch/node_hub.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "penstock/comm/launch/node_link.h"
#include "penstock/comm/launch/node_messages.h"
#include "penstock/comm/launch/remote_shells.h"
#include "penstock/errors.h"
#include "tests/comm/strangers.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"

namespace penstock::comm {
namespace node_hub_test {

using Kind = NodeMessage::Kind;
using penstock::test::has_text;
using namespace std::chrono_literals;

TEST(NodeMessages, SurviveTheirText) {
  std::mt19937 random(7);
  const auto number = [&] { return static_cast<int>(random()); };
  for (int i = 0; i < 500; ++i) {
    NodeMessage message;
    message.kind = static_cast<Kind>(random() % 9);
    for (int* place :
         {&message.attempt, &message.node, &message.nodes, &message.least_nodes, &message.ranks,
          &message.first_rank, &message.world, &message.port, &message.rank, &message.code, &message.signal})
      *place = number();
    message.final = random() % 2 == 1;
    message.host = "host" + std::to_string(random() % 100);
    for (unsigned c = random() % 40; c > 0; --c) message.text += static_cast<char>(32 + random() % 95);
    EXPECT_EQ(decode_node_message(encode(message)), message);
  }
}

TEST(NodeMessages, RefuseEverythingElse) {
  const std::string good = encode({.kind = Kind::Failed, .rank = 3, .host = "a", .text = "exit code 1"});
  for (std::size_t length = 0; length < good.size() - 12; ++length)
    EXPECT_THROW(decode_node_message(good.substr(0, length)), MismatchError) << length;
  EXPECT_THROW(decode_node_message("node2" + good.substr(5)), MismatchError);
  EXPECT_THROW(decode_node_message(good + "\tmore"), MismatchError);
  EXPECT_THROW(decode_node_message("node1\t99" + good.substr(7)), MismatchError);
  // Texts of people cannot add fields or lines.
  const NodeMessage odd = decode_node_message(encode({.host = "a\tb", .text = "one\ntwo\x1b[1m"}));
  EXPECT_EQ(odd.host, "a b");
  EXPECT_EQ(odd.text, "one two [1m");
  EXPECT_LE(encode({.text = std::string(1 << 20, 'x')}).size(), kMaxNodeMessage);
}

// A hub whose launchers are numbers: 0 is its own.
struct Hub {
  explicit Hub(HubOptions with) : hub(options(std::move(with)), now) {}

  static HubOptions options(HubOptions with) {
    with.join_timeout = 60s;
    with.last_call = 10s;
    with.silence = 8s;
    with.place = "alpha:29400";
    with.pick_port = [port = 1000]() mutable { return ++port; };
    return with;
  }
  void join(NodeHub::Id id, const std::string& host, int ranks, int wanted = -1, int least = 2, int most = 2,
            int world = 0) {
    keep(hub.received(id,
                      {.kind = Kind::Join,
                       .node = wanted,
                       .nodes = most,
                       .least_nodes = least,
                       .ranks = ranks,
                       .world = world,
                       .host = host},
                      now));
  }
  void say(NodeHub::Id id, NodeMessage message) { keep(hub.received(id, message, now)); }
  void ended(NodeHub::Id id, int attempt = 0, int code = 0) {
    say(id, {.kind = Kind::Ended, .attempt = attempt, .code = code});
  }
  void leave(NodeHub::Id id) { keep(hub.left(id, "closed", now)); }
  void pass(std::chrono::seconds time) {
    for (; time > 0s; time -= 1s) {
      now += 1s;
      keep(hub.tick(now));
    }
  }
  void keep(const std::vector<NodeHub::Outgoing>& outgoing) {
    for (const auto& each : outgoing)
      if (each.message.kind != Kind::Beat) last[each.to] = each.message;
  }
  Kind kind(NodeHub::Id id) { return last.contains(id) ? last[id].kind : Kind::Beat; }

  NodeHub::Time now{};
  std::map<NodeHub::Id, NodeMessage> last;  // the last message to each launcher, without beats
  NodeHub hub;
};

TEST(NodeHub, StartsWhenAllHostsAreThere) {
  Hub hub({.least_nodes = 2, .most_nodes = 2});
  hub.join(0, "alpha", 2);
  EXPECT_EQ(hub.kind(0), Kind::Beat);
  hub.join(5, "beta", 3);
  ASSERT_EQ(hub.kind(0), Kind::Plan);
  ASSERT_EQ(hub.kind(5), Kind::Plan);
  EXPECT_EQ(hub.last[0].first_rank, 0);
  EXPECT_EQ(hub.last[5].first_rank, 2);
  EXPECT_EQ(hub.last[5].node, 1);
  EXPECT_EQ(hub.last[5].nodes, 2);
  EXPECT_EQ(hub.last[5].world, 5);
  EXPECT_EQ(hub.last[5].port, hub.last[0].port);
  EXPECT_TRUE(has_text(hub.last[0].text, "alpha (ranks 0-1), beta (ranks 2-4)"));
}

TEST(NodeHub, NumbersHostsAsTheyAsk) {
  Hub hub({.least_nodes = 4, .most_nodes = 4});
  hub.join(7, "delta", 1, 3, 4, 4);
  hub.join(3, "gamma", 1, -1, 4, 4);
  hub.join(0, "alpha", 1, 0, 4, 4);
  hub.join(9, "beta", 1, 1, 4, 4);
  EXPECT_EQ(hub.last[0].node, 0);
  EXPECT_EQ(hub.last[9].node, 1);
  EXPECT_EQ(hub.last[7].node, 2);
  EXPECT_EQ(hub.last[3].node, 3);
}

TEST(NodeHub, ARangeStartsWithThoseThatJoinedInTime) {
  Hub hub({.least_nodes = 2, .most_nodes = 4});
  hub.join(0, "alpha", 1, -1, 2, 4);
  hub.pass(30s);
  hub.join(1, "beta", 1, -1, 2, 4);
  hub.pass(9s);
  EXPECT_EQ(hub.kind(0), Kind::Beat) << "the last call is not over";
  hub.join(2, "gamma", 1, -1, 2, 4);
  hub.pass(1s);
  ASSERT_EQ(hub.kind(2), Kind::Plan);
  EXPECT_EQ(hub.last[2].nodes, 3);
  hub.join(3, "delta", 1, -1, 2, 4);
  ASSERT_EQ(hub.kind(3), Kind::Refused);
  EXPECT_TRUE(
      has_text(hub.last[3].text, "already started with alpha (rank 0), beta (rank 1), gamma (rank 2)"));
  Hub full({.least_nodes = 1, .most_nodes = 2});
  full.join(0, "alpha", 1, -1, 1, 2);
  full.join(1, "beta", 1, -1, 1, 2);
  EXPECT_EQ(full.kind(0), Kind::Plan) << "nobody else can come";
}

TEST(NodeHub, GivesUpIfTooFewJoin) {
  Hub hub({.least_nodes = 3, .most_nodes = 3});
  hub.join(0, "alpha", 1, -1, 3, 3);
  hub.join(1, "beta", 1, -1, 3, 3);
  for (int i = 0; i < 59; ++i) {
    hub.pass(1s);
    hub.say(1, {.kind = Kind::Beat});
  }
  EXPECT_EQ(hub.kind(1), Kind::Beat);
  hub.pass(1s);
  ASSERT_EQ(hub.kind(0), Kind::Refused);
  ASSERT_EQ(hub.kind(1), Kind::Refused);
  EXPECT_TRUE(has_text(hub.last[0].text,
                       "only 2 of at least 3 hosts joined at alpha:29400 within 60 s: alpha, beta"));
}

TEST(NodeHub, RefusesWhatDoesNotFit) {
  Hub hub({.least_nodes = 3, .most_nodes = 3});
  hub.join(0, "alpha", 1, 0, 3, 3);
  hub.join(1, "beta", 1, 1, 3, 3);
  hub.join(2, "b2", 1, 1, 3, 3);
  EXPECT_TRUE(has_text(hub.last[2].text, "--node-rank 1 was also given on beta"));
  hub.join(3, "b3", 1, 0, 3, 3);
  EXPECT_TRUE(has_text(hub.last[3].text, "node rank 0 is the host of --rdzv, which is alpha"));
  hub.join(4, "b4", 1, -1, 2, 3);
  EXPECT_TRUE(has_text(hub.last[4].text, "--nnodes 2:3, but the launcher at alpha:29400 with --nnodes 3"));
  hub.join(5, "b5", 1, 3, 3, 3);
  EXPECT_TRUE(has_text(hub.last[5].text, "not below the largest number of hosts, 3"));
  hub.join(6, "b6", 0, -1, 3, 3);
  EXPECT_TRUE(has_text(hub.last[6].text, "it has no ranks"));
  hub.join(7, "b7", 0, -1, 3, 3, 8);
  EXPECT_TRUE(has_text(hub.last[7].text, "8 ranks in all"));
  // A launcher that leaves before the start makes room.
  hub.leave(1);
  hub.join(8, "beta", 1, 1, 3, 3);
  hub.join(9, "gamma", 1, 2, 3, 3);
  EXPECT_EQ(hub.kind(9), Kind::Plan);
}

TEST(NodeHub, DividesAFixedNumberOfRanks) {
  Hub hub({.least_nodes = 2, .most_nodes = 3, .world = 8});
  hub.join(0, "alpha", 0, -1, 2, 3, 8);
  hub.join(1, "beta", 0, -1, 2, 3, 8);
  hub.join(2, "gamma", 0, -1, 2, 3, 8);
  EXPECT_EQ(hub.last[0].ranks, 3);
  EXPECT_EQ(hub.last[1].ranks, 3);
  EXPECT_EQ(hub.last[2].ranks, 2);
  EXPECT_EQ(hub.last[2].first_rank, 6);
  EXPECT_EQ(hub.last[2].world, 8);
}

Hub running(int restarts = 0) {
  Hub hub({.least_nodes = 3, .most_nodes = 3, .restarts = restarts});
  hub.join(0, "alpha", 1, -1, 3, 3);
  hub.join(1, "beta", 1, -1, 3, 3);
  hub.join(2, "gamma", 1, -1, 3, 3);
  return hub;
}

TEST(NodeHub, SuccessEndsWithZero) {
  Hub hub = running();
  hub.ended(0);
  hub.ended(2);
  EXPECT_EQ(hub.kind(0), Kind::Plan) << "beta still runs";
  hub.ended(1);
  for (const NodeHub::Id id : {0, 1, 2}) {
    ASSERT_EQ(hub.kind(id), Kind::Done);
    EXPECT_EQ(hub.last[id].code, 0);
  }
  EXPECT_TRUE(hub.hub.over());
}

TEST(NodeHub, TheFirstFailureIsToldToAllOthers) {
  Hub hub = running();
  hub.say(1, {.kind = Kind::Failed, .rank = 1, .code = 7, .text = "exit code 7 after 2.0 s"});
  EXPECT_EQ(hub.kind(1), Kind::Plan) << "it knows";
  for (const NodeHub::Id id : {0, 2}) {
    ASSERT_EQ(hub.kind(id), Kind::Failed);
    EXPECT_EQ(hub.last[id].host, "beta");
    EXPECT_EQ(hub.last[id].rank, 1);
  }
  hub.say(2, {.kind = Kind::Failed, .rank = 2, .code = 1, .text = "lost a peer"});
  EXPECT_EQ(hub.last[0].rank, 1) << "a consequence is not news";
  for (const NodeHub::Id id : {0, 1, 2}) hub.ended(id, 0, 1);
  EXPECT_EQ(hub.kind(0), Kind::Done);
  EXPECT_EQ(hub.last[0].code, 7);
}

TEST(NodeHub, RestartsUntilNoneIsLeft) {
  Hub hub = running(1);
  const int port = hub.last[0].port;
  hub.say(2, {.kind = Kind::Failed, .rank = 2, .code = 7});
  for (const NodeHub::Id id : {0, 1, 2}) hub.ended(id, 0, 7);
  ASSERT_EQ(hub.kind(1), Kind::Plan);
  EXPECT_EQ(hub.last[1].attempt, 1);
  EXPECT_NE(hub.last[1].port, port);
  hub.say(2, {.kind = Kind::Failed, .attempt = 0, .rank = 2, .code = 7});
  EXPECT_EQ(hub.kind(1), Kind::Plan) << "news of an earlier attempt";
  hub.say(0, {.kind = Kind::Failed, .attempt = 1, .rank = 0, .code = 9});
  for (const NodeHub::Id id : {0, 1, 2}) hub.ended(id, 1, 9);
  ASSERT_EQ(hub.kind(1), Kind::Done);
  EXPECT_EQ(hub.last[1].code, 9);
  EXPECT_TRUE(has_text(hub.last[1].text, "attempt 2 of 2 failed (rank 0 on alpha"));
}

TEST(NodeHub, WithoutAPortForTheRanksItIsOver) {
  Hub hub({.least_nodes = 2, .most_nodes = 2, .restarts = 1});
  bool exhausted = false;
  HubOptions options = Hub::options({.least_nodes = 2, .most_nodes = 2, .restarts = 1});
  options.pick_port = [&] {
    if (exhausted) throw StateError("no free port");
    return 1;
  };
  hub.hub = NodeHub(options, hub.now);
  hub.join(0, "alpha", 1);
  hub.join(1, "beta", 1);
  ASSERT_EQ(hub.kind(1), Kind::Plan);
  exhausted = true;
  hub.say(1, {.kind = Kind::Failed, .rank = 1, .code = 7});
  for (const NodeHub::Id id : {0, 1}) hub.ended(id, 0, 7);
  for (const NodeHub::Id id : {0, 1}) {
    ASSERT_EQ(hub.kind(id), Kind::Done);
    EXPECT_EQ(hub.last[id].code, 1);
    EXPECT_EQ(hub.last[id].text, "attempt 2 cannot begin: no free port");
  }
  EXPECT_TRUE(hub.hub.over());
}

TEST(NodeHub, SomeFailuresAreFinal) {
  Hub hub = running(3);
  hub.say(1, {.kind = Kind::Failed, .rank = 1, .code = 2, .final = true});
  for (const NodeHub::Id id : {0, 1, 2}) hub.ended(id, 0, 2);
  EXPECT_EQ(hub.kind(2), Kind::Done);
  Hub stopped = running(3);
  stopped.say(1, {.kind = Kind::Stop, .signal = 15});
  EXPECT_EQ(stopped.kind(0), Kind::Stop);
  EXPECT_EQ(stopped.kind(2), Kind::Stop);
  EXPECT_EQ(stopped.last[2].host, "beta");
  stopped.say(0, {.kind = Kind::Failed, .rank = 0, .code = 1});
  for (const NodeHub::Id id : {0, 1, 2}) stopped.ended(id, 0, 1);
  EXPECT_EQ(stopped.kind(2), Kind::Done) << "no restart after a stop";
}

TEST(NodeHub, AHostThatIsGoneEndsTheJob) {
  Hub hub = running(3);
  hub.leave(1);
  for (const NodeHub::Id id : {0, 2}) {
    ASSERT_EQ(hub.kind(id), Kind::Lost);
    EXPECT_EQ(hub.last[id].host, "beta");
    EXPECT_EQ(hub.last[id].first_rank, 1);
  }
  hub.ended(0, 0, 1);
  hub.ended(2, 0, 1);
  ASSERT_EQ(hub.kind(2), Kind::Done);
  EXPECT_EQ(hub.last[2].code, 1);
}

TEST(NodeHub, ASilentHostIsLostAfterTheDeadline) {
  Hub hub = running();
  for (int i = 0; i < 20; ++i) {
    hub.pass(1s);
    hub.say(1, {.kind = Kind::Beat});
    if (i < 10) hub.say(2, {.kind = Kind::Beat});
    if (i == 15) {
      EXPECT_EQ(hub.kind(0), Kind::Plan);
    }
  }
  ASSERT_EQ(hub.kind(0), Kind::Lost);
  EXPECT_EQ(hub.last[0].host, "gamma");
  EXPECT_TRUE(has_text(hub.last[0].text, "nothing was heard from its launcher for 8 s"));
}

// The hub runs on a thread of its own: a failure there must reach the launcher.
TEST(NodeLink, TheHubsOwnLauncherHearsThatNoAttemptBegins) {
  HubOptions options = Hub::options({});
  options.pick_port = []() -> int { throw StateError("no free port"); };
  const auto link = open_hub("127.0.0.1", test::port_for_later(), "the secret of this job", options);
  link->send({.kind = Kind::Join, .nodes = 1, .least_nodes = 1, .ranks = 1, .host = "alpha"});
  std::optional<NodeMessage> news;
  for (int i = 0; i < 2000 && !news; ++i) {
    news = link->take();
    std::this_thread::sleep_for(10ms);
  }
  ASSERT_TRUE(news);
  EXPECT_EQ(news->kind, Kind::Done);
  EXPECT_TRUE(has_text(news->text, "no free port"));
}

// ---------------------------------------------------------------------------------------- scripts for other
// hosts

TEST(RemoteScript, IsExecutedAsItIsMeant) {
  const test::TemporaryFolder folder;
  const std::string odd = "it's $HOME `x` \"y\"\\";
  const std::string script =
      remote_script(folder.path.string(), {{"ODD", odd}},
                    {"/bin/sh", "-c", "pwd; printf '%s\\n' \"$ODD\" \"$1\"; exit 5", "sh", odd});
  const std::string file = (folder.path / "script").string();
  std::ofstream(file) << script;
  const auto ended = test::run_command("sh -s < '" + file + "'");
  EXPECT_EQ(ended.exit_code, 5) << ended.output;
  EXPECT_EQ(ended.output, std::filesystem::canonical(folder.path).string() + "\n" + odd + "\n" + odd + "\n");
  std::ofstream(file) << remote_script("/nonexistent/'a b'", {}, {"true"});
  const auto missing = test::run_command("sh -s < '" + file + "'");
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_TRUE(has_text(missing.output, "there is no folder /nonexistent/'a b'"));
}

TEST(RemoteScript, CommandsAreSplitAtBlanks) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(split_command("ssh -p 22"), (Words{"ssh", "-p", "22"}));
  EXPECT_EQ(split_command("  a 'b c'  \"d 'e\"f "), (Words{"a", "b c", "d 'ef"}));
  EXPECT_EQ(split_command("''"), (Words{""}));
  EXPECT_EQ(split_command(""), Words{});
  EXPECT_THROW(split_command("a 'b"), ConfigError);
}

}  // namespace node_hub_test
}  // namespace penstock::comm
