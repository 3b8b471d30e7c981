// Which ranks can use shared memory and loopback with each other.
//
// Names do not tell: two containers on one machine may have the same host name and yet no memory in common,
// and one host may be known by two names. What counts is whether a file that one rank creates in /dev/shm is
// there for the other one. The first rank on a host creates a file with a random token under a name that all
// ranks of the run know; the others read it. Ranks with equal tokens share memory.
//
// The network and process namespaces belong to the identity too: UCX wakes a sleeping peer through a socket
// of the network namespace and opens memory through the peer's process ID, and loopback addresses are valid
// in one network namespace only.
#pragma once

#include <string>

namespace penstock::comm {

class HostIdentity {
 public:
  // `run`: a text that only the ranks of this run know, the same on all of them; used as a part of a file
  // name. `folder`: where shared memory is; another one in tests.
  explicit HostIdentity(const std::string& run, const std::string& folder = "/dev/shm");
  // Removes the file, whoever made it. Call only when every rank has made its identity, or will not make it.
  ~HostIdentity();
  HostIdentity(const HostIdentity&) = delete;
  HostIdentity& operator=(const HostIdentity&) = delete;

  // Equal for two ranks of the run if and only if they share memory, network and processes.
  const std::string& text() const { return text_; }

 private:
  std::string token(const std::string& folder);
  bool create(const std::string& token);

  std::string path_;
  std::string text_;
};

// A text that is the same in all containers of this machine until it is started anew; "" if it is unknown.
std::string machine_identity();

// A new random text of 32 hexadecimal digits.
std::string random_text();

}  // namespace penstock::comm
