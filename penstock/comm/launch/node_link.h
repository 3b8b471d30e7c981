// The connection of a launcher to the hub of its job (node_hub.h), or the hub itself. Messages are
// authenticated by the job's secret.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "penstock/comm/launch/node_hub.h"
#include "penstock/comm/launch/node_messages.h"

namespace penstock::comm {

// For the launcher's loop: one thread.
class NodeLink {
 public:
  using Time = std::chrono::steady_clock::time_point;

  NodeLink() = default;
  virtual ~NodeLink() = default;  // the hub waits up to two seconds for the others to hear its last message
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  virtual bool is_hub() const = 0;
  virtual void send(const NodeMessage& message) = 0;
  // Returns the next message, or std::nullopt if there is none now. The loss of the hub is a message, too:
  // Lost, about node 0, also on the hub itself if it fails. Beats are not returned.
  virtual std::optional<NodeMessage> take() = 0;
  // Readable when `take` may return a message.
  virtual int wake_fd() const = 0;
  // When `take` has to be called next even if nothing arrives.
  virtual Time next_call() const = 0;
};

// Listens at host:port as the hub. Throws ConfigError if the address is not one of this host or the port is
// in use. `secret`: text that all launchers know; empty if there is none.
std::unique_ptr<NodeLink> open_hub(const std::string& host, int port, const std::string& secret,
                                   HubOptions options);

struct MemberOptions {
  std::chrono::milliseconds connect_timeout{};
  std::chrono::milliseconds silence{};
  std::function<bool()> interrupted;  // looked at several times a second while connecting
};

// Connects to the hub. Returns nullptr if interrupted. Throws ConfigError if the hub has another secret or
// something else answers there, TimeoutError if nobody answers in time.
std::unique_ptr<NodeLink> connect_to_hub(const std::string& host, int port, const std::string& secret,
                                         const MemberOptions& options);

// Whether a launcher that was given no node rank is to be the hub: the place is one of this host's addresses,
// and nobody listens there yet.
bool can_be_hub(const std::string& host, int port);

}  // namespace penstock::comm
