// What the hub of a launch over several hosts decides: who takes part with which ranks, when an attempt
// begins, what the other launchers hear of a failure, and when it is over. A state machine without sockets
// and clocks: node_link.h feeds it.
//
//   Joining: launchers join until the largest number of hosts is there, or until the deadline if at least the
//   smallest number is. Hosts get their numbers and ranks then.
//   Running: the first failure is told to all. The attempt is over when every launcher has said that its
//   ranks have ended, or is gone. Another attempt follows if the failure allows it and no host is gone. Over:
//   every launcher has been told the exit code.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/launch/node_messages.h"

namespace penstock::comm {

struct HubOptions {
  int least_nodes = 1, most_nodes = 1;
  int restarts = 0;
  int world = 0;  // ranks on all hosts, divided evenly among them; 0: every launcher says how many it has
  std::chrono::milliseconds join_timeout{};  // for the smallest number of hosts
  std::chrono::milliseconds last_call{};     // for further hosts, once the smallest number is there
  std::chrono::milliseconds silence{};       // a host that says nothing for so long is lost
  std::string place;                         // host:port at which launchers join, for messages
  std::function<int()> pick_port;  // returns a free port of this host for the ranks' rendezvous, or throws
};

class NodeHub {
 public:
  using Id = std::uint64_t;  // of a connection
  using Time = std::chrono::steady_clock::time_point;
  static constexpr Id kSelf = 0;  // this host's own launcher

  struct Outgoing {
    Id to;
    NodeMessage message;
  };

  NodeHub(HubOptions options, Time now);

  // Each returns what is to be sent.
  std::vector<Outgoing> received(Id from, const NodeMessage& message, Time now);
  std::vector<Outgoing> left(Id who, const std::string& why, Time now);
  // To be called at least once a second.
  std::vector<Outgoing> tick(Time now);

  bool over() const { return phase_ == Phase::Over; }

 private:
  enum class Phase { Joining, Running, Over };
  struct Node {
    Id id = 0;
    int wanted = -1;
    std::string host;
    int ranks = 0;
    int first_rank = 0;
    bool ended = false;  // its ranks of this attempt
    bool gone = false;
    Time heard;
  };
  struct Culprit {
    int code = 1;
    bool final = false;
    std::string text;  // "rank 3 on node7, exit code 3"
  };

  void join(Id from, const NodeMessage& message, Time now);
  void start_if_ready(Time now);
  void give_up_joining();
  void begin_attempt();
  void end_attempt_if_over();
  void finish(int code, const std::string& text);
  void lose(std::size_t node, const std::string& why);
  void send(Id to, NodeMessage message);
  void send_to_others(Id except, const NodeMessage& message);
  std::optional<std::size_t> node_of(Id id) const;
  std::string list_of_hosts() const;
  std::vector<Outgoing> take() { return std::exchange(outgoing_, {}); }

  HubOptions options_;
  Phase phase_ = Phase::Joining;
  Time begin_, last_beat_, last_tick_;
  std::optional<Time> enough_since_;
  std::vector<Node> nodes_;  // by node number once the first attempt has begun
  int attempt_ = 0;
  std::optional<Culprit> culprit_;
  int stopped_by_ = 0;
  bool lost_host_ = false;
  int ended_code_ = 0;  // the largest exit code of a launcher that reported no failed rank
  std::vector<Outgoing> outgoing_;
};

}  // namespace penstock::comm
