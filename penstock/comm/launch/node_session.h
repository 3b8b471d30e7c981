// A launch over several hosts, as the launcher of one host sees it: joins the others, starts theirs over ssh
// if asked to, and says before each attempt which ranks to start and after it whether another one follows.
//
// Its loops react to stop signals, so that no wait keeps a user from ending the launcher.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/comm/launch/launch_attempt.h"
#include "penstock/comm/launch/node_link.h"
#include "penstock/comm/launch/remote_shells.h"

namespace penstock::comm {

class NodeSession {
 public:
  // Joins the job. Throws ConfigError for a place or a secret that does not fit, TimeoutError if the hosts do
  // not meet in time.
  NodeSession(const LaunchOptions& options, LaunchSignals& signals, Terminal& terminal, OrphanGuard& guard);
  ~NodeSession();
  NodeSession(const NodeSession&) = delete;
  NodeSession& operator=(const NodeSession&) = delete;

  // Waits for the first plan. std::nullopt: a signal stopped the launcher (stopped_by).
  std::optional<AttemptPlan> join();
  // Waits until the ranks of all hosts have ended. Returns the next attempt, or std::nullopt: it is over
  // (exit_code).
  std::optional<AttemptPlan> finish(const AttemptPlan& plan, const AttemptResult& ended);

  int exit_code() const { return exit_code_; }
  int stopped_by() const { return stopped_by_; }

  // During an attempt. `take` returns failures, losses and stops on other hosts.
  void add_to_poll(std::vector<pollfd>& list) const;
  NodeLink::Time next_call() const;
  std::optional<NodeMessage> take();
  void report_failure(int rank, int code, bool final, const std::string& text);
  void report_stop(int signal);

 private:
  void start_other_hosts();
  // Waits for something to happen and handles signals and output. Returns the next message, if there is one.
  std::optional<NodeMessage> wait_for_news();
  AttemptPlan plan_of(const NodeMessage& message) const;
  void say(const std::string& text);
  void check_shells();

  const LaunchOptions& options_;
  const NodeOptions& nodes_;
  LaunchSignals& signals_;
  Terminal& terminal_;
  OrphanGuard& guard_;
  std::string secret_;
  std::unique_ptr<RemoteShells> shells_;  // outlives the link, whose end they wait for
  std::unique_ptr<NodeLink> link_;
  bool joined_ = false;
  int attempt_ = 0;
  int exit_code_ = 1;
  int stopped_by_ = 0;
  int stops_ = 0;  // stop signals while no rank of this host runs
};

// The sentence about a message of another host: "rank 3 on node7 failed first: exit code 3 after 2.1 s".
std::string describe_news(const NodeMessage& message);

}  // namespace penstock::comm
