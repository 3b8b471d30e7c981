// TCP sockets that listen where the other ranks are, and nowhere else.
#pragma once

#include <string>

#include "penstock/comm/transport/host_lookup.h"
#include "penstock/comm/transport/transfer.h"
#include "penstock/errors.h"

namespace penstock::comm {

// Owns a listening socket.
class ListeningSocket {
 public:
  ListeningSocket() = default;
  ~ListeningSocket() { close(); }
  ListeningSocket(ListeningSocket&& other) noexcept : fd_(other.release()) {}
  ListeningSocket& operator=(ListeningSocket&& other) noexcept;

  // `address`: numeric, or "" for all interfaces. Port 0: any free port. Throws ConfigError ending in
  // `remedy` if the port is in use or the address is not one of this host.
  static ListeningSocket bind(const std::string& address, int port, const std::string& remedy);

  int port() const;
  int fd() const { return fd_; }
  int release() noexcept;
  void close() noexcept;

 private:
  int fd_ = -1;
};

// Waits until host:port accepts connections. Throws TimeoutError with `context` at the deadline; c10d would
// instead retry with messages that do not name the remedy.
void await_listening(HostLookup& host, int port, Clock::time_point deadline, CommContext context);

// Returns the name by which other hosts know this one.
std::string own_host_name();

}  // namespace penstock::comm
