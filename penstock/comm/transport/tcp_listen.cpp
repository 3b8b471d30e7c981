#include "penstock/comm/transport/tcp_listen.h"

#include <fmt/format.h>
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

void await_listening(HostLookup& host, int port, Clock::time_point deadline, CommContext context) {
  const auto begin = Clock::now();
  for (;;) {
    constexpr std::chrono::milliseconds kOneTry{2000};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    const int fd = host.connect(port, std::clamp(left, std::chrono::milliseconds(1), kOneTry));
    if (fd >= 0) {
      close(fd);
      return;
    }
    if (Clock::now() >= deadline) {
      context.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
      throw TimeoutError(fmt::format("no answer from the rendezvous at {}:{} ({}); check that rank 0 is "
                                     "running and that MASTER_ADDR "
                                     "and MASTER_PORT name its host and port",
                                     host.host(), port, host.problem()),
                         context);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace penstock::comm
