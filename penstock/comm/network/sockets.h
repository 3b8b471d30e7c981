// TCP sockets on numeric addresses, as descriptors that the caller owns.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace penstock::comm {

// Returns a listening socket, or -1 with errno set (EINVAL: not a numeric address). `address` "": all
// interfaces, of both families where the system has IPv6. Port 0: any free port.
int open_listener(const std::string& address, int port);

// Returns the port of a bound socket, or -1.
int port_of_socket(int fd);

// Returns a connected socket, or -1 with errno set; ETIMEDOUT if nobody answered by the deadline.
int open_connection(const std::string& address, int port, std::chrono::steady_clock::time_point deadline);

}  // namespace penstock::comm
