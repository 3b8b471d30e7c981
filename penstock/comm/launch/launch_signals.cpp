#include "penstock/comm/launch/launch_signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr std::array<int, 4> kCaught = {SIGINT, SIGTERM, SIGHUP, SIGCHLD};

// A handler can access only globals. The pipe is created once and never closed: a handler that still runs in
// another thread while the old handlers are restored must not write into a descriptor that has been reused.
std::atomic<bool> in_use{false};
std::array<std::atomic<int>, kCaught.size()> arrived{};
std::atomic<int> wake_read{-1};
std::atomic<int> wake_write{-1};
static_assert(std::atomic<int>::is_always_lock_free, "needed inside signal handlers");

extern "C" void penstock_launch_on_signal(int signal) {
  const int saved = errno;
  for (std::size_t i = 0; i < kCaught.size(); ++i)
    if (kCaught[i] == signal) arrived[i].fetch_add(1);
  const char byte = 0;
  // A full pipe also wakes the loop; the counters hold what arrived.
  [[maybe_unused]] const ssize_t written = write(wake_write.load(), &byte, 1);
  errno = saved;
}

void make_wake_pipe() {
  if (wake_write.load() >= 0) return;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw StateError(std::string("launch: cannot create a pipe: ") + std::strerror(errno) +
                     "; raise `ulimit -n`");
  wake_read.store(ends[0]);
  wake_write.store(ends[1]);
}

}  // namespace

LaunchSignals::LaunchSignals() {
  if (in_use.exchange(true))
    throw StateError(
        "launch: this process is already launching ranks; wait for that launch to return before the next");
  try {
    make_wake_pipe();
  } catch (...) {
    in_use.store(false);
    throw;
  }
  for (auto& count : arrived) count.store(0);
  clear();

  struct sigaction action = {};
  action.sa_handler = penstock_launch_on_signal;
  sigfillset(&action.sa_mask);
  // No SA_RESTART: a write to a blocked terminal must return so that the signal is handled. SIGCHLD restarts,
  // because calls of other threads should not notice the launcher's children.
  for (std::size_t i = 0; i < kCaught.size(); ++i) {
    sigaction(kCaught[i], nullptr, &old_actions_[i]);
    if (kCaught[i] != SIGCHLD && old_actions_[i].sa_handler == SIG_IGN) continue;
    action.sa_flags = kCaught[i] == SIGCHLD ? SA_RESTART | SA_NOCLDSTOP : 0;
    sigaction(kCaught[i], &action, nullptr);
  }

  sigset_t pending;
  sigpending(&pending);
  pipe_was_pending_ = sigismember(&pending, SIGPIPE) == 1;
  pthread_sigmask(SIG_SETMASK, nullptr, &old_mask_);
  sigset_t mask = old_mask_;
  for (const int signal : kCaught) sigdelset(&mask, signal);
  sigaddset(&mask, SIGPIPE);
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
}

LaunchSignals::~LaunchSignals() {
  if (!pipe_was_pending_) {
    // Failed writes of the launcher may have left a SIGPIPE pending; it must not reach the caller when the
    // mask is restored.
    sigset_t only_pipe;
    sigemptyset(&only_pipe);
    sigaddset(&only_pipe, SIGPIPE);
    const timespec at_once = {};
    while (sigtimedwait(&only_pipe, nullptr, &at_once) < 0 && errno == EINTR) {
    }
  }
  for (std::size_t i = 0; i < kCaught.size(); ++i) sigaction(kCaught[i], &old_actions_[i], nullptr);
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  in_use.store(false);
}

int LaunchSignals::wake_fd() const { return wake_read.load(); }

void LaunchSignals::clear() {
  char bytes[256];
  while (read(wake_read.load(), bytes, sizeof bytes) > 0) {
  }
}

int LaunchSignals::take_stop() {
  for (std::size_t i = 0; i < kCaught.size(); ++i) {
    if (kCaught[i] == SIGCHLD || arrived[i].load() == 0) continue;
    arrived[i].fetch_sub(1);
    return kCaught[i];
  }
  return 0;
}

AllSignalsBlocked::AllSignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old_mask_);
}

AllSignalsBlocked::~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr); }

}  // namespace penstock::comm
