#include "penstock/comm/launch/node_hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "penstock/base/quote.h"

namespace penstock::comm {

namespace {

using NodeKind = NodeMessage::Kind;

std::string nodes_text(int least, int most) {
  return least == most ? fmt::format("{}", least) : fmt::format("{}:{}", least, most);
}

std::string ranks_text(int first, int count) {
  return count == 1 ? fmt::format("rank {}", first) : fmt::format("ranks {}-{}", first, first + count - 1);
}

// A tick comes once a second.
constexpr std::chrono::seconds kOwnPause{3};

double seconds_of(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

NodeHub::NodeHub(HubOptions options, Time now)
    : options_(std::move(options)), begin_(now), last_beat_(now), last_tick_(now) {}

std::vector<NodeHub::Outgoing> NodeHub::received(Id from, const NodeMessage& message, Time now) {
  if (message.kind == NodeKind::Join) {
    join(from, message, now);
    return take();
  }
  const auto number = node_of(from);
  if (!number || nodes_[*number].gone) return take();
  Node& node = nodes_[*number];
  node.heard = now;
  if (phase_ != Phase::Running || message.attempt != attempt_) return take();
  switch (message.kind) {
    case NodeKind::Failed:
      if (!culprit_) {
        culprit_ = Culprit{message.code, message.final,
                           fmt::format("rank {} on {}, {}", message.rank, node.host, message.text)};
        NodeMessage news = message;
        news.node = static_cast<int>(*number);
        news.host = node.host;
        send_to_others(from, news);
      }
      break;
    case NodeKind::Stop:
      if (stopped_by_ == 0 || message.signal != stopped_by_) {
        if (stopped_by_ == 0) stopped_by_ = message.signal;
        NodeMessage news = message;
        news.node = static_cast<int>(*number);
        news.host = node.host;
        send_to_others(from, news);
      }
      break;
    case NodeKind::Ended:
      node.ended = true;
      ended_code_ = std::max(ended_code_, message.code);
      if (stopped_by_ == 0) stopped_by_ = message.signal;
      end_attempt_if_over();
      break;
    default:
      break;
  }
  return take();
}

std::vector<NodeHub::Outgoing> NodeHub::left(Id who, const std::string& why, Time now) {
  const auto number = node_of(who);
  if (!number || phase_ == Phase::Over) return take();
  if (phase_ == Phase::Joining) {
    nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(*number));  // it may join again
    if (static_cast<int>(nodes_.size()) < options_.least_nodes) enough_since_.reset();
    start_if_ready(now);
  } else {
    lose(*number, why);
  }
  return take();
}

std::vector<NodeHub::Outgoing> NodeHub::tick(Time now) {
  // This process was stopped itself: what the others said meanwhile has not been read.
  if (now - last_tick_ > kOwnPause)
    for (Node& node : nodes_) node.heard = now;
  last_tick_ = now;
  if (phase_ == Phase::Joining) {
    start_if_ready(now);
    const bool enough = static_cast<int>(nodes_.size()) >= options_.least_nodes;
    if (phase_ == Phase::Joining && !enough && now - begin_ >= options_.join_timeout) give_up_joining();
  }
  if (phase_ == Phase::Running)
    for (std::size_t number = 0; number < nodes_.size() && phase_ == Phase::Running; ++number) {
      const Node& node = nodes_[number];
      if (node.id != kSelf && !node.gone && now - node.heard >= options_.silence)
        lose(number,
             fmt::format("nothing was heard from its launcher for {:.0f} s: the network to it is cut, or "
                         "the host has stopped",
                         seconds_of(options_.silence)));
    }
  const auto interval = std::min<std::chrono::milliseconds>(options_.silence / 4, std::chrono::seconds(5));
  if (phase_ != Phase::Over && now - last_beat_ >= interval) {
    last_beat_ = now;
    send_to_others(kSelf, {.kind = NodeKind::Beat});
  }
  return take();
}

void NodeHub::join(Id from, const NodeMessage& message, Time now) {
  const auto refuse = [&](const std::string& why) {
    send(from, {.kind = NodeKind::Refused, .host = message.host, .text = why});
  };
  if (node_of(from)) return;
  if (phase_ != Phase::Joining)
    return refuse(
        fmt::format("the job at {} has already started with {}; start all launchers within {:.0f} s, or "
                    "allow more time with --join-timeout and --last-call",
                    options_.place, list_of_hosts(), seconds_of(options_.join_timeout)));
  if (message.world != options_.world)
    return refuse(
        fmt::format("it trains {} ranks in all, but the launcher at {} trains {}; start all with the same "
                    "configuration",
                    message.world, options_.place, options_.world));
  if (options_.world == 0 && message.ranks < 1) return refuse("it has no ranks; set their number with -n");
  if (message.least_nodes != options_.least_nodes || message.nodes != options_.most_nodes)
    return refuse(
        fmt::format("it was started with --nnodes {}, but the launcher at {} with --nnodes {}; start all "
                    "with the same value",
                    nodes_text(message.least_nodes, message.nodes), options_.place,
                    nodes_text(options_.least_nodes, options_.most_nodes)));
  if (from != kSelf && message.node == 0)
    return refuse(
        fmt::format("node rank 0 is the host of --rdzv, which is {}; use another --node-rank, or none",
                    nodes_.empty() ? options_.place : nodes_.front().host));
  if (message.node >= options_.most_nodes)
    return refuse(fmt::format("--node-rank {} is not below the largest number of hosts, {}", message.node,
                              options_.most_nodes));
  for (const Node& node : nodes_)
    if (message.node >= 0 && node.wanted == message.node)
      return refuse(fmt::format("--node-rank {} was also given on {}; give each host its own, or none",
                                message.node, node.host));
  if (static_cast<int>(nodes_.size()) >= options_.most_nodes)
    return refuse(fmt::format("{} hosts have joined already: {}", nodes_.size(), list_of_hosts()));
  Node node;
  node.id = from;
  node.wanted = message.node;
  node.host = message.host;
  node.ranks = message.ranks;
  node.heard = now;
  nodes_.push_back(node);
  start_if_ready(now);
}

void NodeHub::start_if_ready(Time now) {
  const int count = static_cast<int>(nodes_.size());
  if (count < options_.least_nodes || phase_ != Phase::Joining) return;
  // Without its own launcher there is no node 0; it joins first, so that this is only for completeness.
  if (!node_of(kSelf)) return;
  if (!enough_since_) enough_since_ = now;
  if (count < options_.most_nodes && now - *enough_since_ < options_.last_call) return;
  // Node numbers follow the wanted ones; those without follow in the order in which they joined. The hub is
  // node 0.
  std::stable_sort(nodes_.begin(), nodes_.end(), [](const Node& a, const Node& b) {
    const auto key = [](const Node& node) {
      return node.id == kSelf ? -1 : node.wanted < 0 ? kMaxNodes : node.wanted;
    };
    return key(a) < key(b);
  });
  int rank = 0, number = 0;
  for (Node& node : nodes_) {
    if (options_.world > 0) node.ranks = options_.world / count + (number++ < options_.world % count ? 1 : 0);
    node.first_rank = rank;
    node.heard = now;
    rank += node.ranks;
  }
  phase_ = Phase::Running;
  begin_attempt();
}

void NodeHub::give_up_joining() {
  const std::string why = fmt::format(
      "only {} of at least {} hosts joined at {} within {:.0f} s: {}; start the launcher on the others "
      "with the same --nnodes and --rdzv, check that they reach this address, or allow more time with "
      "--join-timeout",
      nodes_.size(), options_.least_nodes, options_.place, seconds_of(options_.join_timeout),
      list_of_hosts());
  for (const Node& node : nodes_) send(node.id, {.kind = NodeKind::Refused, .host = node.host, .text = why});
  phase_ = Phase::Over;
}

void NodeHub::begin_attempt() {
  culprit_.reset();
  stopped_by_ = 0;
  ended_code_ = 0;
  int port = 0;
  try {
    port = options_.pick_port();
  } catch (const std::exception& error) {
    return finish(1, fmt::format("attempt {} cannot begin: {}", attempt_ + 1, error.what()));
  }
  const int world = nodes_.back().first_rank + nodes_.back().ranks;
  for (std::size_t number = 0; number < nodes_.size(); ++number) {
    Node& node = nodes_[number];
    node.ended = false;
    send(node.id, {.kind = NodeKind::Plan,
                   .attempt = attempt_,
                   .node = static_cast<int>(number),
                   .nodes = static_cast<int>(nodes_.size()),
                   .ranks = node.ranks,
                   .first_rank = node.first_rank,
                   .world = world,
                   .port = port,
                   .host = nodes_.front().host,
                   .text = list_of_hosts()});
  }
}

void NodeHub::end_attempt_if_over() {
  if (phase_ != Phase::Running) return;
  if (!std::all_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.ended || node.gone; }))
    return;
  if (!culprit_) return finish(lost_host_ ? 1 : ended_code_, "");
  if (stopped_by_ != 0 || lost_host_ || culprit_->final || options_.restarts == 0)
    return finish(culprit_->code, "");
  if (attempt_ == options_.restarts)
    return finish(culprit_->code, fmt::format("attempt {} of {} failed ({}); no restart is left",
                                              attempt_ + 1, options_.restarts + 1, culprit_->text));
  ++attempt_;
  begin_attempt();
}

void NodeHub::finish(int code, const std::string& text) {
  phase_ = Phase::Over;
  for (const Node& node : nodes_)
    if (!node.gone) send(node.id, {.kind = NodeKind::Done, .attempt = attempt_, .code = code, .text = text});
}

void NodeHub::lose(std::size_t number, const std::string& why) {
  Node& node = nodes_[number];
  if (node.gone) return;
  node.gone = true;
  lost_host_ = true;
  const std::string text =
      fmt::format("{} ({}), {}", node.host, ranks_text(node.first_rank, node.ranks), why);
  // If a rank failed before, the host that goes afterwards is a consequence.
  if (!culprit_) culprit_ = Culprit{1, true, text};
  const NodeMessage news = {.kind = NodeKind::Lost,
                            .attempt = attempt_,
                            .node = static_cast<int>(number),
                            .ranks = node.ranks,
                            .first_rank = node.first_rank,
                            .host = node.host,
                            .text = why};
  send_to_others(node.id, news);
  end_attempt_if_over();
}

void NodeHub::send(Id to, NodeMessage message) { outgoing_.push_back({to, std::move(message)}); }

void NodeHub::send_to_others(Id except, const NodeMessage& message) {
  for (const Node& node : nodes_)
    if (node.id != except && !node.gone) send(node.id, message);
}

std::optional<std::size_t> NodeHub::node_of(Id id) const {
  for (std::size_t number = 0; number < nodes_.size(); ++number)
    if (nodes_[number].id == id) return number;
  return std::nullopt;
}

std::string NodeHub::list_of_hosts() const {
  std::string list;
  for (const Node& node : nodes_)
    list += fmt::format(
        "{}{}{}", list.empty() ? "" : ", ", node.host,
        phase_ == Phase::Joining ? "" : fmt::format(" ({})", ranks_text(node.first_rank, node.ranks)));
  return list.empty() ? "none" : list;
}

}  // namespace penstock::comm
