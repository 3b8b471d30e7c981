// Owned sockets, and the settings that connections between ranks have in common.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

namespace penstock::comm {

// An owned descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { reset(); }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

// Never blocks, sends small messages at once, and lets the kernel find out that the other host has vanished.
void tune_connection(int fd);

// What one call moved. `Later`: nothing now; call again when the socket is ready. `Closed`: by the other end
// in order. `Broken`: errno says why.
enum class IoState { Some, Later, Closed, Broken };
struct IoResult {
  IoState state = IoState::Later;
  std::size_t bytes = 0;
};
IoResult read_some(int fd, char* to, std::size_t at_most);
IoResult write_some(int fd, std::string_view bytes);

}  // namespace penstock::comm
