// Signals as events of the launcher's loop.
//
// Handlers and a pipe rather than signalfd: in a process with other threads a signal may be delivered to any
// of them, and signalfd sees only what every thread blocks.
#pragma once

#include <signal.h>

namespace penstock::comm {

// While it exists, SIGINT, SIGTERM, SIGHUP and SIGCHLD wake the loop, and SIGPIPE of this thread becomes the
// error EPIPE. A stop signal that was ignored before stays ignored, which is how nohup protects a job. One
// per process at a time (StateError); created and destroyed by the same thread.
class LaunchSignals {
 public:
  LaunchSignals();
  ~LaunchSignals();
  LaunchSignals(const LaunchSignals&) = delete;
  LaunchSignals& operator=(const LaunchSignals&) = delete;

  // Readable after a signal came. `clear` empties it; call that before looking at what happened.
  int wake_fd() const;
  void clear();

  // The next stop signal that came and was not yet taken; 0: none.
  int take_stop();

 private:
  struct sigaction old_actions_[4] = {};
  sigset_t old_mask_ = {};
  bool pipe_was_pending_ = false;
};

// Blocks every signal of this thread while a child is being made: a handler of ours that ran in the child
// would write into the pipe it shares with us.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked();
  ~AllSignalsBlocked();
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t old_mask_ = {};
};

}  // namespace penstock::comm
