#include "penstock/comm/transport/tcp_listen.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "penstock/comm/network/host_address.h"
#include "penstock/comm/network/sockets.h"

namespace penstock::comm {

namespace {

std::string errno_text() { return std::strerror(errno); }

}  // namespace

ListeningSocket& ListeningSocket::operator=(ListeningSocket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

ListeningSocket ListeningSocket::bind(const std::string& address, int port, const std::string& remedy) {
  ListeningSocket result;
  result.fd_ = open_listener(address, port);
  if (result.fd_ < 0)
    throw ConfigError(fmt::format(
        "cannot listen on TCP port {}: {}; {}",
        address.empty() || is_loopback(address) ? fmt::format("{}", port) : address_and_port(address, port),
        errno_text(), remedy));
  return result;
}

int ListeningSocket::port() const { return port_of_socket(fd_); }

int ListeningSocket::release() noexcept { return std::exchange(fd_, -1); }

void ListeningSocket::close() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::string own_host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

int connect_to(const std::string& host, int port, std::chrono::milliseconds limit) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    errno = EHOSTUNREACH;
    return -1;
  }
  int fd = -1;
  for (const addrinfo* at = found; at != nullptr && fd < 0; at = at->ai_next) {
    fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    // Bounds the connect; the caller retries until its own deadline.
    const timeval bound{limit.count() / 1000, (limit.count() % 1000) * 1000};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);
    if (connect(fd, at->ai_addr, at->ai_addrlen) != 0) {
      const int error = errno == EINPROGRESS ? ETIMEDOUT : errno;
      close(fd);
      fd = -1;
      errno = error;
    }
  }
  freeaddrinfo(found);
  if (fd >= 0) {
    const timeval none{0, 0};
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return fd;
}

void require_known_host(const std::string& host, Clock::time_point deadline, const std::string& remedy) {
  constexpr std::chrono::seconds kRetryTime{3};
  const auto last = std::min(deadline, Clock::now() + kRetryTime);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  for (;;) {
    addrinfo* found = nullptr;
    const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
    if (error == 0) {
      freeaddrinfo(found);
      return;
    }
    if (error != EAI_AGAIN || Clock::now() >= last)
      throw ConfigError(fmt::format("rendezvous: the host \"{}\" cannot be resolved ({}); {}", host,
                                    error == EAI_SYSTEM ? errno_text() : gai_strerror(error), remedy));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

void await_listening(const std::string& host, int port, Clock::time_point deadline, CommContext context) {
  const auto begin = Clock::now();
  for (;;) {
    constexpr std::chrono::milliseconds kOneTry{2000};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    const int fd = connect_to(host, port, std::clamp(left, std::chrono::milliseconds(1), kOneTry));
    if (fd >= 0) {
      close(fd);
      return;
    }
    const std::string why = errno_text();
    if (Clock::now() >= deadline) {
      context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
      throw TimeoutError(fmt::format("no answer from the rendezvous at {}:{} ({}); check that rank 0 is "
                                     "running and that MASTER_ADDR "
                                     "and MASTER_PORT name its host and port",
                                     host, port, why),
                         context);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace penstock::comm
