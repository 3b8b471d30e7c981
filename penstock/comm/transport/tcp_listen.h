// TCP sockets that listen on loopback unless ranks of other hosts have to reach them.
#pragma once

#include <string>

#include "penstock/comm/transport/transfer.h"
#include "penstock/errors.h"

namespace penstock::comm {

enum class ListenOn { Loopback, AllInterfaces };

// Owns a listening socket.
class ListeningSocket {
 public:
  ListeningSocket() = default;
  ~ListeningSocket() { close(); }
  ListeningSocket(ListeningSocket&& other) noexcept : fd_(other.release()) {}
  ListeningSocket& operator=(ListeningSocket&& other) noexcept;

  // Port 0: any free port. Throws ConfigError ending in `remedy` if the port is in use.
  static ListeningSocket bind(ListenOn where, int port, const std::string& remedy);

  int port() const;
  int fd() const { return fd_; }
  int release() noexcept;
  void close() noexcept;

 private:
  int fd_ = -1;
};

// Makes the socket of this process that already listens on `port` drop connections from other hosts. For
// LibTorch versions whose store always opens its own socket on all interfaces. Logs a warning if the kernel
// refuses socket filters.
void restrict_to_loopback(int port);

// Throws ConfigError ending in `remedy` unless the host name can be resolved. The answer "no such host" is
// final; a name server that does not answer is queried again for a short time, at most until the deadline.
void require_known_host(const std::string& host, Clock::time_point deadline, const std::string& remedy);

// Waits until host:port accepts connections. Throws TimeoutError with `context` at the deadline; c10d would
// instead retry with messages that do not name the remedy.
void await_listening(const std::string& host, int port, Clock::time_point deadline, CommContext context);

// Returns the name by which other hosts know this one.
std::string own_host_name();

// Connects, or returns -1 with errno set if refused or unreachable.
int connect_to(const std::string& host, int port);

}  // namespace penstock::comm
