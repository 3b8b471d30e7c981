// What processes that do not belong to a job may send to its ports, for tests.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace penstock::test {

inline sockaddr_in loopback_address(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

// A listening socket on loopback and its port.
inline std::pair<int, int> listen_on_loopback() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback_address(0);
  socklen_t length = sizeof address;
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(fd, 1024) != 0 || getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error("no listening socket");
  return {fd, ntohs(address.sin_port)};
}

// A port for a listener of later: below those that the kernel gives to connections and the launcher to ranks,
// so that no other test takes it meanwhile.
inline int port_for_later() {
  std::random_device random;
  for (;;) {
    const int port = 10'000 + static_cast<int>(random() % 5'000), on = 1;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const sockaddr_in address = loopback_address(port);
    const bool free =
        bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 && listen(fd, 1) == 0;
    close(fd);
    if (free) return port;
  }
}

// Connects to a port of this host; -1 if that is refused.
inline int stranger(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback_address(port);
  if (fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

inline void say(int fd, const std::string& bytes) {
  [[maybe_unused]] const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Everything that the other end says until it closes or the time is over; `closed`: whether it did.
inline std::string hear(int fd, int limit_ms, bool* closed = nullptr) {
  std::string heard;
  if (closed != nullptr) *closed = false;
  for (;;) {
    pollfd ready{fd, POLLIN, 0};
    if (poll(&ready, 1, limit_ms) <= 0) return heard;
    char part[4096];
    const ssize_t got = recv(fd, part, sizeof part, 0);
    if (got <= 0) {
      if (closed != nullptr) *closed = true;
      return heard;
    }
    heard.append(part, static_cast<std::size_t>(got));
  }
}

// Lets this process open as many files as it may.
inline void raise_descriptor_limit() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Attacks ports until it is destroyed: bytes that other stores would take for a request, announcements of 1.5
// GiB, garbage, half a hello, one byte, connections that only stay, and ones that reset at once.
class Strangers {
 public:
  explicit Strangers(std::vector<int> ports, int idle = 100) {
    for (const int port : ports)
      thread_.emplace_back([this, port, idle] {
        std::mt19937 random(static_cast<unsigned>(port));
        std::vector<int> open;
        while (!stop_) {
          const int fd = stranger(port);
          if (fd < 0) {
            ++refused_;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            continue;
          }
          ++connections_;
          say(fd, words(random));
          open.push_back(fd);
          if (random() % 4 == 0) {
            const linger reset{1, 0};
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
          }
          while (static_cast<int>(open.size()) > idle) {
            const auto chosen = static_cast<std::size_t>(random()) % open.size();
            close(open[chosen]);
            open[chosen] = open.back();
            open.pop_back();
          }
          if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        for (const int fd : open) close(fd);
      });
  }
  ~Strangers() {
    stop_ = true;
    for (std::thread& thread : thread_) thread.join();
  }
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

  int connections() const { return connections_; }

 private:
  static std::string words(std::mt19937& random) {
    switch (random() % 6) {
      case 0:
        return std::string(1, '\0');
      case 1:  // SET of a key of 3 bytes and a value of 1.5 GiB, as c10d's TCP store writes them
        return std::string("\0\x03\0\0\0\0\0\0\0key\0\0\0\x60\0\0\0\0", 20) + std::string(4000, 'x');
      case 2:
        return std::string("PNSTKHL\x01\x01\0\0\0\x01", 13);
      case 3:
        return std::string("PNSTKHL\x01\x01\0\0\0\x01", 13) + std::string(32 + 32, 'p');
      case 4:
        return "";
      default: {
        std::string garbage(random() % 3000, '\0');
        for (char& byte : garbage) byte = static_cast<char>(random());
        return garbage;
      }
    }
  }

  std::atomic<bool> stop_{false};
  std::atomic<int> connections_{0}, refused_{0};
  std::vector<std::thread> thread_;
};

}  // namespace penstock::test
