// An event descriptor that one thread uses to wake another from poll. Internal to ucx_transport.cpp.
#pragma once

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "penstock/errors.h"

namespace penstock::comm {

// Wakes one sleeping wait.
class WakeEvent {
 public:
  WakeEvent() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0)
      throw CommError(
          fmt::format("UCX transport: cannot create an event descriptor: {}; raise the limit of open files",
                      std::strerror(errno)),
          {});
  }
  ~WakeEvent() { ::close(fd_); }
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  int fd() const { return fd_; }
  void notify() noexcept {
    const std::uint64_t one = 1;
    // The write fails only if the counter is full, and then the sleeper wakes anyway.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
  }
  void reset() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof count);  // EAGAIN: it was not signalled
  }

 private:
  int fd_;
};

}  // namespace penstock::comm
