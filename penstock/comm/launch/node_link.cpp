#include "penstock/comm/launch/node_link.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "penstock/base/quote.h"
#include "penstock/comm/launch/launch_process.h"
#include "penstock/comm/network/host_address.h"
#include "penstock/comm/network/sockets.h"
#include "penstock/comm/secure/connection.h"
#include "penstock/comm/secure/secret.h"
#include "penstock/comm/secure/server.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using std::chrono::steady_clock;

// How long a launcher tries again after its secret was refused.
constexpr std::chrono::seconds kRefusalIsBelieved{3};

std::chrono::milliseconds beat_interval(std::chrono::milliseconds silence) {
  return std::clamp<std::chrono::milliseconds>(silence / 4, std::chrono::milliseconds(100),
                                               std::chrono::seconds(5));
}

bool is_own_address(const std::string& address) {
  return is_loopback(address) || !interface_of(interface_addresses(), address).empty();
}

// The address on which the hub listens: that of the name, or everywhere if the name says only loopback here
// but means something else on other hosts.
std::string hub_address(const std::string& host) { return listen_at(host, false).bind_address(); }

class HubLink final : public NodeLink {
 public:
  HubLink(Socket listener, const std::string& secret, const HubOptions& options)
      : place_(options.place), state_(std::make_shared<State>(options)) {
    ServerLimits limits;
    // All launchers of a job may come at once.
    limits.half_open += 2 * static_cast<std::size_t>(options.most_nodes);
    limits.max_payload = kMaxNodeMessage;
    limits.peers = kMaxNodes;
    SecureServer::Events events;
    events.joined = [](SecureServer::Id, int) {};
    events.received = [this](SecureServer::Id from, std::string_view payload) {
      deliver(state_->hub.received(id_of(from), decode_node_message(payload), steady_clock::now()));
    };
    events.closed = [this](SecureServer::Id who, int, const std::string& why) {
      deliver(state_->hub.left(id_of(who), fmt::format("the connection to its launcher ended ({})", why),
                               steady_clock::now()));
    };
    events.tick = [this] { deliver(state_->hub.tick(steady_clock::now())); };
    events.failed = [this](const std::string& why) { lose(why); };
    server_ = std::make_unique<SecureServer>(std::move(listener), Purpose::Launch, JobKey(secret), limits,
                                             std::move(events));
    server_->start();
  }

  ~HubLink() override {
    server_->await_alone(steady_clock::now() + std::chrono::seconds(2));
    server_->stop();  // its thread uses this object until then
  }

  bool is_hub() const override { return true; }

  void send(const NodeMessage& message) override {
    server_->post([this, message] {
      try {
        deliver(state_->hub.received(NodeHub::kSelf, message, steady_clock::now()));
      } catch (const std::exception& error) {
        lose(error.what());  // this launcher would wait for an answer for ever
      }
    });
  }

  std::optional<NodeMessage> take() override {
    std::uint64_t count = 0;
    while (read(state_->wake.get(), &count, sizeof count) > 0) {
    }
    const std::lock_guard lock(state_->mutex);
    if (state_->inbox.empty()) return std::nullopt;
    NodeMessage message = std::move(state_->inbox.front());
    state_->inbox.pop_front();
    if (!state_->inbox.empty()) state_->ring();
    return message;
  }

  int wake_fd() const override { return state_->wake.get(); }
  Time next_call() const override { return Time::max(); }

 private:
  struct State {
    explicit State(HubOptions options)
        : hub(std::move(options), steady_clock::now()), wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
      if (!wake)
        throw StateError(fmt::format("launch: cannot create an event descriptor: {}; raise `ulimit -n`",
                                     std::strerror(errno)));
    }
    void ring() const {
      const std::uint64_t one = 1;
      // It fails only if the counter is full, and then the launcher's loop wakes up anyway.
      [[maybe_unused]] const auto written = write(wake.get(), &one, sizeof one);
    }

    NodeHub hub;  // used on the server's thread alone
    Fd wake;
    std::mutex mutex;
    std::deque<NodeMessage> inbox;  // for this host's own launcher
  };

  // Connections of the server are numbered from 0 or 1; 0 is this host's own launcher.
  static NodeHub::Id id_of(SecureServer::Id peer) { return peer + 1; }

  void deliver(const std::vector<NodeHub::Outgoing>& outgoing) {
    for (const NodeHub::Outgoing& each : outgoing) {
      if (each.to != NodeHub::kSelf) {
        server_->send(each.to - 1, encode(each.message));
      } else if (each.message.kind != NodeMessage::Kind::Beat) {
        tell_self(each.message);
      }
    }
  }

  // The same message with which the other launchers learn that they have lost the hub.
  void lose(const std::string& why) {
    tell_self({.kind = NodeMessage::Kind::Lost,
               .node = 0,
               .host = place_,
               .text = fmt::format("it can no longer serve the other launchers ({})", why)});
  }

  void tell_self(const NodeMessage& message) {
    const std::lock_guard lock(state_->mutex);
    state_->inbox.push_back(message);
    state_->ring();
  }

  const std::string place_;
  std::shared_ptr<State> state_;
  std::unique_ptr<SecureServer> server_;
};

class MemberLink final : public NodeLink {
 public:
  MemberLink(SecureConnection connection, std::string place, std::chrono::milliseconds silence)
      : connection_(std::move(connection)), place_(std::move(place)), silence_(silence) {}

  bool is_hub() const override { return false; }

  void send(const NodeMessage& message) override {
    if (lost_) return;
    try {
      // What does not fit now is sent before the next message: beats follow soon.
      connection_.send(encode(message), steady_clock::now() + std::chrono::milliseconds(200));
      sent_ = steady_clock::now();
    } catch (const ConnectionLost& error) {
      lose(error.what());
    }
  }

  std::optional<NodeMessage> take() override {
    try {
      while (!lost_) {
        const auto payload = connection_.receive(steady_clock::now());
        if (!payload) break;
        heard_ = steady_clock::now();
        NodeMessage message = decode_node_message(*payload);
        if (message.kind != NodeMessage::Kind::Beat) return message;
      }
    } catch (const Error& error) {
      lose(error.what());
    }
    const auto now = steady_clock::now();
    if (!lost_ && now - heard_ >= silence_)
      lose(fmt::format(
          "nothing was heard from it for {:.0f} s: the network to it is cut, or the host has stopped",
          std::chrono::duration<double>(silence_).count()));
    if (!lost_ && now - sent_ >= beat_interval(silence_)) send({.kind = NodeMessage::Kind::Beat});
    if (lost_ && !told_) {
      told_ = true;
      return NodeMessage{.kind = NodeMessage::Kind::Lost,
                         .node = 0,
                         .host = place_,
                         .text = fmt::format("the connection to its launcher ended ({})", why_)};
    }
    return std::nullopt;
  }

  // A connection that is lost stays readable.
  int wake_fd() const override { return lost_ ? -1 : connection_.fd(); }
  Time next_call() const override {
    if (lost_) return told_ ? Time::max() : steady_clock::now();
    return std::min(sent_ + beat_interval(silence_), heard_ + silence_);
  }

 private:
  void lose(const std::string& why) {
    lost_ = true;
    why_ = why;
  }

  SecureConnection connection_;
  std::string place_;
  std::chrono::milliseconds silence_;
  Time heard_ = steady_clock::now(), sent_ = steady_clock::now();
  bool lost_ = false, told_ = false;
  std::string why_;
};

}  // namespace

std::unique_ptr<NodeLink> open_hub(const std::string& host, int port, const std::string& secret,
                                   HubOptions options) {
  options.place = address_and_port(host, port);
  const std::string address = hub_address(host);
  Socket listener(open_listener(address, port));
  if (!listener)
    throw ConfigError(fmt::format(
        "launch: cannot listen at {}: {}; {}", options.place, std::strerror(errno),
        errno == EADDRINUSE ? "choose another port in --rdzv, on every host, or end the program that uses it"
                            : "--rdzv must name an address of the host of node rank 0"));
  return std::make_unique<HubLink>(std::move(listener), secret, options);
}

std::unique_ptr<NodeLink> connect_to_hub(const std::string& host, int port, const std::string& secret,
                                         const MemberOptions& options) {
  const std::string place = address_and_port(host, port);
  const auto deadline = steady_clock::now() + options.connect_timeout;
  const JobKey key(secret);
  std::string why = "it has no address";
  std::optional<steady_clock::time_point> first_refusal;
  for (;;) {
    for (const std::string& address : addresses_of_name(host)) {
      if (options.interrupted && options.interrupted()) return nullptr;
      const auto try_until = std::min(deadline, steady_clock::now() + std::chrono::seconds(2));
      const int fd = open_connection(address, port, try_until);
      if (fd < 0) {
        why = std::strerror(errno);
        continue;
      }
      SecureConnection connection(Socket(fd), kMaxNodeMessage);
      switch (connection.shake_hands(key, Purpose::Launch, 0, try_until)) {
        case HandshakeEnd::Done:
          return std::make_unique<MemberLink>(std::move(connection), place, options.silence);
        case HandshakeEnd::Refused:
          // A hub that ends, or to which too many connect at once, closes the connection as well.
          why = "it has another secret";
          if (!first_refusal) first_refusal = steady_clock::now();
          if (steady_clock::now() - *first_refusal < kRefusalIsBelieved && steady_clock::now() < deadline)
            break;
          throw ConfigError(
              fmt::format("launch: the launcher at {} has another secret; set PENSTOCK_SECRET to the same "
                          "text on every host",
                          place));
        case HandshakeEnd::Foreign:
          throw ConfigError(
              fmt::format("launch: what listens at {} is not a launcher of Penstock; check --rdzv", place));
        case HandshakeEnd::Silent:
          why = "it accepts connections and does not answer";
          break;
        case HandshakeEnd::Closed:
          why = "it closed the connection";
          break;
      }
    }
    if (options.interrupted && options.interrupted()) return nullptr;
    if (steady_clock::now() >= deadline) {
      CommContext context;
      context.operation = "launch";
      context.elapsed_s = std::chrono::duration<double>(options.connect_timeout).count();
      throw TimeoutError(
          fmt::format(
              "no launcher answers at {} ({}); start the launcher of node rank 0 there, and check that "
              "--rdzv names it and that no firewall is between the hosts",
              place, why),
          context);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

bool can_be_hub(const std::string& host, int port) {
  const std::vector<std::string> addresses = addresses_of_name(host);
  if (std::none_of(addresses.begin(), addresses.end(), is_own_address)) return false;
  const Socket probe(open_listener(hub_address(host), port));
  return static_cast<bool>(probe);
}

}  // namespace penstock::comm
