#include "penstock/comm/launch/node_session.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "penstock/base/env.h"
#include "penstock/base/quote.h"
#include "penstock/comm/launch/launch_notices.h"
#include "penstock/comm/launch/launch_process.h"
#include "penstock/comm/network/host_address.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/errors.h"

extern char** environ;

namespace penstock::comm {

namespace {

using SessionClock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// How long the launchers of other hosts have to end after the last message, before they are killed.
constexpr auto kShellsEndTime = 5s;

std::string name_of_this_host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// Variables that a launcher on another host needs as well: what configures Penstock and the libraries below
// it.
bool goes_along(std::string_view name) {
  // The secret is added by itself; the others belong to ranks of this host.
  for (const char* own : {kSecretVariable, kNoticesVariable, "PENSTOCK_LAUNCH_ID", "PENSTOCK_RESTART_COUNT"})
    if (name == own) return false;
  for (const char* prefix : {"PENSTOCK_", "GLOO_", "NCCL_", "UCX_", "OMP_", "MKL_", "OPENBLAS_"})
    if (name.starts_with(prefix)) return true;
  return name == "CUDA_VISIBLE_DEVICES" || name == "LD_LIBRARY_PATH";
}

std::vector<std::pair<std::string, std::string>> environment_that_goes_along(const std::string& secret) {
  std::vector<std::pair<std::string, std::string>> result = {{kSecretVariable, secret}};
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto equal = text.find('=');
    if (equal == std::string_view::npos || !goes_along(text.substr(0, equal))) continue;
    result.emplace_back(text.substr(0, equal), text.substr(equal + 1));
  }
  return result;
}

}  // namespace

std::string describe_news(const NodeMessage& message) {
  switch (message.kind) {
    case NodeMessage::Kind::Failed:
      return fmt::format("rank {} on {} failed first: {}", message.rank, message.host, message.text);
    case NodeMessage::Kind::Lost:
      return message.ranks > 0
                 ? fmt::format("{} (node {}, {}) is lost: {}", message.host, message.node,
                               message.ranks == 1 ? fmt::format("rank {}", message.first_rank)
                                                  : fmt::format("ranks {}-{}", message.first_rank,
                                                                message.first_rank + message.ranks - 1),
                               message.text)
                 : fmt::format("the launcher of node {} at {} is lost: {}", message.node, message.host,
                               message.text);
    default:
      return message.text;
  }
}

NodeSession::NodeSession(const LaunchOptions& options, LaunchSignals& signals, Terminal& terminal,
                         OrphanGuard& guard)
    : options_(options), nodes_(*options.nodes), signals_(signals), terminal_(terminal), guard_(guard) {
  secret_ = env_text(kSecretVariable).value_or("");
  if (!secret_.empty()) check_secret(secret_);
  if (secret_.empty() && !nodes_.hosts.empty()) {
    secret_ = make_secret();
    ::setenv(kSecretVariable, secret_.c_str(), 1);  // for the ranks of this host
  }
  const bool hub = nodes_.node_rank ? *nodes_.node_rank == 0 : can_be_hub(nodes_.rdzv_host, nodes_.rdzv_port);
  if (secret_.empty())
    say(fmt::format(
        "PENSTOCK_SECRET is not set: whoever reaches {} can take part in this job; set it to the same "
        "text on every host",
        address_and_port(nodes_.rdzv_host, nodes_.rdzv_port)));
  if (hub) {
    HubOptions hub_options;
    hub_options.least_nodes = nodes_.least_nodes;
    hub_options.most_nodes = nodes_.most_nodes;
    hub_options.restarts = options_.restarts;
    hub_options.world = nodes_.world;
    hub_options.join_timeout = nodes_.join_timeout;
    hub_options.last_call = nodes_.last_call;
    hub_options.silence = nodes_.silence;
    hub_options.pick_port = [port = options_.port] { return port != 0 ? port : free_port(); };
    link_ = open_hub(nodes_.rdzv_host, nodes_.rdzv_port, secret_, std::move(hub_options));
    say(fmt::format("node 0 of {}: waiting at {} for the launchers of the other hosts",
                    nodes_.least_nodes == nodes_.most_nodes
                        ? fmt::format("{}", nodes_.least_nodes)
                        : fmt::format("{} to {}", nodes_.least_nodes, nodes_.most_nodes),
                    address_and_port(nodes_.rdzv_host, nodes_.rdzv_port)));
    start_other_hosts();
  } else {
    MemberOptions member;
    member.connect_timeout = nodes_.join_timeout;
    member.silence = nodes_.silence;
    member.interrupted = [&] {
      if (stopped_by_ == 0) stopped_by_ = signals_.take_stop();
      return stopped_by_ != 0;
    };
    link_ = connect_to_hub(nodes_.rdzv_host, nodes_.rdzv_port, secret_, member);
  }
}

NodeSession::~NodeSession() {
  link_.reset();
  if (!shells_) return;
  const auto end = SessionClock::now() + kShellsEndTime;
  bool asked = false;
  while (!shells_->all_ended() && SessionClock::now() < end) {
    shells_->pump();
    terminal_.pump();
    if (!asked && SessionClock::now() > end - 2s) {
      shells_->send(SIGTERM);
      asked = true;
    }
    std::vector<pollfd> list;
    shells_->add_to_poll(list);
    poll(list.data(), list.size(), 50);
  }
}

std::optional<AttemptPlan> NodeSession::join() {
  if (!link_) return std::nullopt;  // stopped while connecting
  link_->send({.kind = NodeMessage::Kind::Join,
               .node = nodes_.node_rank.value_or(-1),
               .nodes = nodes_.most_nodes,
               .least_nodes = nodes_.least_nodes,
               .ranks = nodes_.world > 0 ? 0 : options_.ranks,
               .world = nodes_.world,
               .host = name_of_this_host()});
  for (;;) {
    const auto news = wait_for_news();
    if (stopped_by_ != 0) return std::nullopt;
    if (!news) {
      check_shells();
      continue;
    }
    switch (news->kind) {
      case NodeMessage::Kind::Plan:
        joined_ = true;
        attempt_ = news->attempt;
        if (link_->is_hub())
          say(fmt::format("{} ranks on {} hosts: {}", news->world, news->nodes, news->text));
        return plan_of(*news);
      case NodeMessage::Kind::Refused:
        throw ConfigError(fmt::format("launch: {} cannot take part: {}", name_of_this_host(), news->text));
      case NodeMessage::Kind::Lost: {
        CommContext context;
        context.operation = "launch";
        throw CommError(fmt::format("{}, before all hosts had joined", describe_news(*news)), context);
      }
      case NodeMessage::Kind::Done:
        throw StateError("launch: " + news->text);
      default:
        break;
    }
  }
}

std::optional<AttemptPlan> NodeSession::finish(const AttemptPlan& plan, const AttemptResult& ended) {
  const bool own_stop = ended.stopped_by != 0;
  int code = ended.start_code;
  for (const RankOutcome& rank : ended.ranks)
    if (!rank.ok() && code == 0) code = rank.code();
  link_->send({.kind = NodeMessage::Kind::Ended,
               .attempt = plan.attempt,
               .code = code,
               .signal = own_stop ? ended.stopped_by : 0});
  // The hub is lost: there is nobody to wait for, and how the ranks of this host ended is a consequence.
  if (ended.hub_lost) {
    exit_code_ = 1;
    return std::nullopt;
  }
  const int stops_before = stops_;
  for (;;) {
    const auto news = wait_for_news();
    // No rank of this host is left; a second request does not wait for the others either.
    if (stops_ - stops_before >= 2) {
      exit_code_ = 128 + stopped_by_;
      return std::nullopt;
    }
    if (!news) continue;
    switch (news->kind) {
      case NodeMessage::Kind::Plan:
        attempt_ = news->attempt;
        if (stops_ != stops_before) {
          // The hub began this attempt before it heard of the signal: it ends with no rank of this host.
          report_stop(stopped_by_);
          link_->send(
              {.kind = NodeMessage::Kind::Ended, .attempt = attempt_, .code = code, .signal = stopped_by_});
          break;
        }
        say(fmt::format("attempt {} of {} begins on {} hosts", news->attempt + 1, options_.restarts + 1,
                        news->nodes));
        return plan_of(*news);
      case NodeMessage::Kind::Done:
        exit_code_ = news->code;
        if (!news->text.empty() && link_->is_hub()) say(news->text);
        return std::nullopt;
      case NodeMessage::Kind::Failed:
        say(describe_news(*news));
        break;
      case NodeMessage::Kind::Lost:
        say(describe_news(*news));
        if (news->node != 0) break;
        exit_code_ = std::max(code, 1);
        return std::nullopt;
      default:
        break;
    }
  }
}

void NodeSession::add_to_poll(std::vector<pollfd>& list) const {
  list.push_back({link_->wake_fd(), POLLIN, 0});
  if (shells_) shells_->add_to_poll(list);
}

NodeLink::Time NodeSession::next_call() const { return link_->next_call(); }

std::optional<NodeMessage> NodeSession::take() {
  if (shells_) shells_->pump();
  return link_->take();
}

void NodeSession::report_failure(int rank, int code, bool final, const std::string& text) {
  link_->send({.kind = NodeMessage::Kind::Failed,
               .attempt = attempt_,
               .rank = rank,
               .code = code,
               .final = final,
               .text = text});
}

void NodeSession::report_stop(int signal) {
  link_->send({.kind = NodeMessage::Kind::Stop, .attempt = attempt_, .signal = signal});
}

void NodeSession::start_other_hosts() {
  if (nodes_.hosts.empty()) return;
  shells_ = std::make_unique<RemoteShells>(split_command(nodes_.ssh), terminal_, guard_);
  const auto environment = environment_that_goes_along(secret_);
  const std::string folder = std::filesystem::current_path().string();
  for (std::size_t node = 1; node < nodes_.hosts.size(); ++node)
    shells_->start(nodes_.hosts[node],
                   remote_script(folder, environment, nodes_.command_of_node(static_cast<int>(node))));
}

std::optional<NodeMessage> NodeSession::wait_for_news() {
  std::vector<pollfd> list;
  if (auto news = take()) return news;
  list.assign(1, {signals_.wake_fd(), POLLIN, 0});
  add_to_poll(list);
  terminal_.add_to_poll(list);
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(link_->next_call() - SessionClock::now()).count();
  // A shell that ends wakes nobody who has no stream of it left.
  poll(list.data(), list.size(), static_cast<int>(std::clamp<long long>(left, 0, 500)));
  signals_.clear();
  while (const int signal = signals_.take_stop()) {
    ++stops_;
    stopped_by_ = signal;
    if (joined_) report_stop(signal);
  }
  terminal_.pump();
  return take();
}

AttemptPlan NodeSession::plan_of(const NodeMessage& message) const {
  AttemptPlan plan;
  plan.attempt = message.attempt;
  plan.ranks = message.ranks;
  plan.first_rank = message.first_rank;
  plan.world_size = message.world;
  plan.node = message.node;
  plan.nodes = message.nodes;
  plan.master = nodes_.rdzv_host;
  plan.port = message.port;
  return plan;
}

void NodeSession::say(const std::string& text) { print_launcher_line(terminal_, text); }

void NodeSession::check_shells() {
  if (!shells_) return;
  for (const RemoteShells::EndedShell& ended : shells_->take_ended())
    throw ConfigError(
        fmt::format("launch: no launcher joined from {}: {} ended with exit code {}; check that `{} {} "
                    "true` works without a password and that penstock is installed there at the same "
                    "path",
                    ended.host, split_command(nodes_.ssh).front(), ended.code, nodes_.ssh, ended.host));
}

}  // namespace penstock::comm
