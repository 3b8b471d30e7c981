// Turns signals into events of the launcher's loop.
//
// Uses handlers and a pipe rather than signalfd: in a process with other threads a signal may be delivered to
// any of them, and signalfd sees only signals that every thread blocks.
#pragma once

#include <signal.h>

namespace penstock::comm {

// During its lifetime SIGINT, SIGTERM, SIGHUP and SIGCHLD wake the loop, and SIGPIPE of this thread becomes
// the error EPIPE. A stop signal that was ignored before stays ignored, which is how nohup protects a job.
// Only one per process at a time (StateError); create and destroy it in the same thread.
class LaunchSignals {
 public:
  LaunchSignals();
  ~LaunchSignals();
  LaunchSignals(const LaunchSignals&) = delete;
  LaunchSignals& operator=(const LaunchSignals&) = delete;

  // Readable after a signal arrived. `clear` empties it; call that before checking what happened.
  int wake_fd() const;
  void clear();

  // Returns the next stop signal that arrived and was not yet taken, or 0.
  int take_stop();

 private:
  struct sigaction old_actions_[4] = {};
  sigset_t old_mask_ = {};
  bool pipe_was_pending_ = false;
};

// Blocks every signal of this thread while a child is being created: a handler of this process that ran in
// the child would write into the shared pipe.
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
