#include "penstock/comm/secure/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace penstock::comm {

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void Socket::reset() noexcept {
  if (fd_ >= 0) ::close(release());
}

void tune_connection(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  // A socket of a test may be one of a pair that is not TCP: the options then have no effect.
  const int on = 1, idle_s = 10, interval_s = 5, probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

IoResult read_some(int fd, char* to, std::size_t at_most) {
  const ssize_t n = recv(fd, to, at_most, MSG_DONTWAIT);
  if (n > 0) return {IoState::Some, static_cast<std::size_t>(n)};
  if (n == 0) return {IoState::Closed, 0};
  return {errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? IoState::Later : IoState::Broken, 0};
}

IoResult write_some(int fd, std::string_view bytes) {
  const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n >= 0) return {IoState::Some, static_cast<std::size_t>(n)};
  return {errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? IoState::Later : IoState::Broken, 0};
}

}  // namespace penstock::comm
