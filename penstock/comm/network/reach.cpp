#include "penstock/comm/network/reach.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "penstock/comm/network/host_address.h"
#include "penstock/comm/network/sockets.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

using ReachClock = std::chrono::steady_clock;

struct NumericAddress {
  addrinfo* list = nullptr;
  NumericAddress(const std::string& address, int port) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) list = nullptr;
  }
  ~NumericAddress() {
    if (list != nullptr) freeaddrinfo(list);
  }
  NumericAddress(const NumericAddress&) = delete;
  NumericAddress& operator=(const NumericAddress&) = delete;
};

struct ConnectAttempt {
  int fd = -1;
  bool done = false;
  int error = 0;  // errno of a failed attempt
};

ConnectAttempt begin_connect(const ReachTarget& target) {
  const NumericAddress address(target.address, target.port);
  if (address.list == nullptr) return {-1, true, EINVAL};
  ConnectAttempt attempt;
  attempt.fd = socket(address.list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (attempt.fd < 0) return {-1, true, errno};
  if (connect(attempt.fd, address.list->ai_addr, address.list->ai_addrlen) == 0) {
    attempt.done = true;
  } else if (errno != EINPROGRESS) {
    attempt.done = true;
    attempt.error = errno;
  }
  return attempt;
}

void finish_connect(ConnectAttempt& attempt) {
  socklen_t length = sizeof attempt.error;
  if (getsockopt(attempt.fd, SOL_SOCKET, SO_ERROR, &attempt.error, &length) != 0) attempt.error = errno;
  attempt.done = true;
}

}  // namespace

ReachablePort::ReachablePort(const std::string& address) : fd_(open_listener(address, 0)) {
  if (fd_ < 0)
    throw StateError(
        fmt::format("cannot listen on {}, by which the other hosts should reach this one: {}; set "
                    "GLOO_SOCKET_IFNAME to the "
                    "interface of the network between the hosts",
                    address, std::strerror(errno)));
  port_ = port_of_socket(fd_);
}

ReachablePort::~ReachablePort() {
  if (fd_ >= 0) close(fd_);
}

std::string unreachable_targets(const std::vector<ReachTarget>& targets, ReachClock::time_point deadline) {
  std::vector<ConnectAttempt> attempts;
  attempts.reserve(targets.size());
  for (const ReachTarget& target : targets) attempts.push_back(begin_connect(target));
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<ConnectAttempt*> of;
    for (ConnectAttempt& attempt : attempts)
      if (!attempt.done) {
        waiting.push_back({attempt.fd, POLLOUT, 0});
        of.push_back(&attempt);
      }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - ReachClock::now()).count();
    if (waiting.empty() || left <= 0) break;
    const int ready =
        poll(waiting.data(), waiting.size(), static_cast<int>(std::min<long long>(left, 60'000)));
    if (ready < 0 && errno != EINTR) break;
    for (std::size_t i = 0; ready > 0 && i < waiting.size(); ++i)
      if (waiting[i].revents != 0) finish_connect(*of[i]);
  }
  std::string problems;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (attempts[i].fd >= 0) close(attempts[i].fd);
    if (attempts[i].done && attempts[i].error == 0) continue;
    problems += fmt::format("{}{} at {} ({})", problems.empty() ? "" : ", ", targets[i].name,
                            address_and_port(targets[i].address, targets[i].port),
                            attempts[i].done ? std::strerror(attempts[i].error) : "no answer");
  }
  return problems;
}

}  // namespace penstock::comm
