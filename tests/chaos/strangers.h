// Programs that do not belong to the job and talk to its ports: with garbage, with floods of connections,
// with connections that stay and say nothing.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/chaos/plan.h"

namespace penstock::chaos {

// A TCP socket that accepts connections.
struct Listening {
  sockaddr_storage address{};
  socklen_t length = 0;
  int port = 0;
  bool any_address = false;
  bool loopback = false;

  bool operator==(const Listening& other) const;
};

// Those of these processes, which must be in one network.
std::vector<Listening> listening_sockets(const std::vector<pid_t>& processes);

struct StrangerOptions {
  Fault fault = Fault::Garbage;  // Garbage, Flood or HalfOpen
  std::uint64_t seed = 0;
  double seconds = 0;   // 0: until it is killed
  int connections = 0;  // of HalfOpen, for each port
  std::string reach;    // where sockets on any address are reached: "127.0.0.1"; sockets on the loopback
                        // interface are left out unless it is one of its addresses
  std::function<std::vector<pid_t>()> processes;  // of the job, asked again and again: ports come and go
  std::atomic<std::int64_t>* reached = nullptr;   // counts connections
};

// The body of a stranger, in the network from which it connects. Returns an exit code.
int be_stranger(const StrangerOptions& options);

// Random bytes of one of several kinds: noise, headers of protocols, lengths that are never followed.
std::string garbage_bytes(std::uint64_t seed);

}  // namespace penstock::chaos
