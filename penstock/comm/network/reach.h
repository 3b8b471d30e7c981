// Whether hosts reach each other on the addresses on which their ranks listen, before a backend relies on it:
// a backend reports a firewall or a wrong network as a connection that it cannot make, after its own timeout,
// and without saying between which hosts.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace penstock::comm {

// A socket that others can connect to; it accepts nothing, because the kernel completes connections by
// itself.
class ReachablePort {
 public:
  // Throws StateError if the address is not one of this host, or no port is left.
  explicit ReachablePort(const std::string& address);
  ~ReachablePort();
  ReachablePort(const ReachablePort&) = delete;
  ReachablePort& operator=(const ReachablePort&) = delete;

  int port() const { return port_; }

 private:
  int fd_ = -1;
  int port_ = 0;
};

struct ReachTarget {
  std::string name;  // for the message
  std::string address;
  int port = 0;
};

// Connects to all targets at once and returns a sentence about those that cannot be reached by the deadline;
// "" if all can.
std::string unreachable_targets(const std::vector<ReachTarget>& targets,
                                std::chrono::steady_clock::time_point deadline);

}  // namespace penstock::comm
