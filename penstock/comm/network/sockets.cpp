#include "penstock/comm/network/sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace penstock::comm {

namespace {

struct SocketPlace {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

bool place_of(const std::string& address, int port, SocketPlace& place) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  std::memcpy(&place.storage, found->ai_addr, found->ai_addrlen);
  place.length = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

int failed_socket(int fd) {
  const int error = errno;
  if (fd >= 0) close(fd);
  errno = error;
  return -1;
}

int listen_at_place(SocketPlace place, bool both_families) {
  const int fd = socket(place.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (both_families) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(fd, place.get(), place.length) != 0 || listen(fd, 1024) != 0) return failed_socket(fd);
  return fd;
}

}  // namespace

int open_listener(const std::string& address, int port) {
  SocketPlace place;
  if (!address.empty()) {
    if (place_of(address, port, place)) return listen_at_place(place, false);
    errno = EINVAL;
    return -1;
  }
  if (place_of("::", port, place))
    if (const int fd = listen_at_place(place, true); fd >= 0 || errno == EADDRINUSE || errno == EACCES)
      return fd;
  SocketPlace ipv4;  // a system without IPv6
  place_of("0.0.0.0", port, ipv4);
  return listen_at_place(ipv4, false);
}

int port_of_socket(int fd) {
  SocketPlace place;
  place.length = sizeof place.storage;
  if (getsockname(fd, place.get(), &place.length) != 0) return -1;
  if (place.storage.ss_family == AF_INET)
    return ntohs(reinterpret_cast<sockaddr_in&>(place.storage).sin_port);
  if (place.storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<sockaddr_in6&>(place.storage).sin6_port);
  return -1;
}

int open_connection(const std::string& address, int port, std::chrono::steady_clock::time_point deadline) {
  using std::chrono::steady_clock;
  SocketPlace place;
  if (!place_of(address, port, place)) {
    errno = EINVAL;
    return -1;
  }
  const int fd = socket(place.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  if (connect(fd, place.get(), place.length) == 0) return fd;
  if (errno != EINPROGRESS) return failed_socket(fd);
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now()).count();
    pollfd ready{fd, POLLOUT, 0};
    const int got = poll(&ready, 1, static_cast<int>(std::clamp<long long>(left, 0, 60'000)));
    if (got > 0) break;
    if (got < 0 && errno != EINTR) return failed_socket(fd);
    if (left <= 0) {
      errno = ETIMEDOUT;
      return failed_socket(fd);
    }
  }
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return failed_socket(fd);
  if (error == 0) return fd;
  errno = error;
  return failed_socket(fd);
}

}  // namespace penstock::comm
